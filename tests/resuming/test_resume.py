"""A run that is interrupted and resumed, with any number of stages, equals one that is not."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference, Run, ended, steps_of, until
from support.real_jobs.sources import JOB
from support.slow import slow

RICH = """
    import random
    import sys
    import time

    import torch
    from torch import nn

    HELD = "held" in sys.argv

    class Scale(nn.Module):
        \"\"\"Has extra state, buffers that no state dict has or forwards make, and draws.\"\"\"

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1), persistent=False)
            self.register_buffer("means", torch.zeros(0))
            self.calls = 0

        def forward(self, x):
            self.seen += x.detach().mean()
            self.calls += 1
            if not hasattr(self, "most"):
                self.register_buffer("most", torch.zeros(()))
            self.most = torch.maximum(self.most, x.detach().max())
            self.means = torch.cat([self.means, x.detach().mean().view(1)])
            seen = self.seen + self.most + self.means.mean()
            return x * (1 + 0.01 * random.random()) + 0.01 * seen

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    def model():
        first, last = nn.Linear(16, 16), nn.Linear(16, 16)
        last.weight = first.weight
        return nn.Sequential(
            first, nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16),
            Scale(), last, nn.Linear(16, 4),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output.float(), target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)

    def evaluation():
        yield torch.randn(8, 16), torch.randint(0, 4, (8,))

    def data():
        from pathlib import Path
        for number in range(5):
            while HELD and number == 3 and not Path("go").exists():
                time.sleep(0.01)
            length = random.randint(9, 16)
            yield torch.randn(length, 16), torch.randint(0, 4, (length,))
"""
WORDS = (
    *("--microbatches", "4", "--accumulate", "2", "--evaluate-every", "2", "--clip-grad-norm", "1"),
    *("--precision", "fp16", "--deferred-batch-norm"),
)
"""All that has a state: five mini-batches an epoch, two a step, so that epochs end within steps."""
WHOLE = ("--stages", "1", *WORDS, "--steps", "7", "--keep", "1")
"""The run that is not interrupted."""


def resumed(jobs: Jobs, run: Run, *words: str) -> Run:
    job_file = str(jobs.folder / "job.py")
    done = jobs.pipeworker("launch", "--resume", "--run-dir", str(run.path), *words, job_file)
    return Run(run.path, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "resumes",
    [
        [("2", "7", ("--recompute", "except_first", "--balance", "3,5"))],
        pytest.param(
            [
                ("2", "6", ("--recompute", "never", "--balance", "3,5")),
                ("4", "9", ("--recompute", "except_first")),
            ],
            marks=slow,
        ),
    ],
    ids=["once", "twice"],
)
def test_a_resumed_run_is_bitwise_equal_at_any_number_of_stages(
    jobs: Jobs, reference: Reference, resumes: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    """It is resumed after an odd number of mini-batches within an epoch."""
    last = resumes[-1][1]
    uncut = reference("--stages", "1", *WORDS, "--steps", last, "--keep", "1", source=RICH)
    cut = jobs.train("--stages", "3", *WORDS, "--steps", "3", "--keep", "1", source=RICH)
    counted = _calls(cut.checkpoint.path)
    for stages, steps, more in resumes:
        cut = resumed(jobs, cut, "--stages", stages, "--steps", steps, *more)
        assert cut.status == 0, cut.stderr
    assert [row["step"] for row in cut.metrics] == [*range(1, int(last) + 1)]
    assert_same(cut, uncut)
    for name in ("loss_scale", "samples"):
        assert [row[name] for row in cut.metrics] == [row[name] for row in uncut.metrics]
    rows = [(run.path / "evaluation.jsonl").read_text() for run in (cut, uncut)]
    assert rows[0] == rows[1]
    assert _calls(cut.checkpoint.path) > 2 * counted > 0  # as many as recompute made them


def _calls(checkpoint: Path) -> int:
    """Return the calls that a layer has counted in its extra state."""
    found: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("state-*.json")):
        found |= json.loads(path.read_text())["extra"]
    calls: int = found["5._extra_state"]["calls"]
    return calls


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=slow)])
def test_a_signal_saves_a_checkpoint_and_no_later_step_is_lost(
    jobs: Jobs, reference: Reference, number: signal.Signals
) -> None:
    """The signal of a cluster before it takes the host, and one that ends the job."""
    process, path = jobs.start(
        *("--stages", "2", *WORDS, "--steps", "7", "--", "held"), source=RICH
    )
    until(lambda: steps_of(path))
    process.send_signal(signal.SIGUSR1)
    (jobs.folder / "go").touch()
    until(
        lambda: [*(path / "checkpoints").glob("step-*")] if (path / "checkpoints").exists() else 0
    )
    process.send_signal(number)
    process.send_signal(signal.SIGUSR1)
    run = ended(process, path, None)
    if run.status == 0:  # the job ended first
        return
    assert run.status == 130
    assert run.summary["status"] == "interrupted"
    last = run.summary["steps"]
    assert (path / f"checkpoints/step-{last:08d}").is_dir()
    done = resumed(jobs, run, "--stages", "1")
    assert done.status == 0, done.stderr
    assert [row["step"] for row in done.metrics] == [*range(1, 8)]
    whole = reference(*WHOLE, source=RICH)
    assert [row["loss"] for row in done.metrics] == [row["loss"] for row in whole.metrics]


@pytest.mark.parametrize("stages", ["1", pytest.param("3", marks=slow)])
def test_a_signal_does_not_wait_for_an_evaluation(
    jobs: Jobs, reference: Reference, stages: str
) -> None:
    """The pass of the interrupted run has no end; the resumed run begins with a whole one."""
    source = RICH.replace(
        """def evaluation():
        yield torch.randn(8, 16), torch.randint(0, 4, (8,))
""",
        """def evaluation():
        from pathlib import Path
        yield torch.randn(8, 16), torch.randint(0, 4, (8,))
        while HELD and Path("endless").exists():
            Path("begun").touch()
            yield torch.randn(8, 16), torch.randint(0, 4, (8,))
""",
    )
    assert source != RICH
    (jobs.folder / "endless").touch()
    words = ("--stages", stages, *WORDS, "--steps", "7")
    process, path = jobs.start(*words, "--", "held", source=source)
    (jobs.folder / "go").touch()
    until((jobs.folder / "begun").exists)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    (jobs.folder / "endless").unlink()
    assert process.returncode == 130, stderr
    assert "the evaluation after step 2 is not complete; --resume begins with it" in stderr
    assert not (path / "evaluation.jsonl").exists()
    done = resumed(jobs, Run(path, 130, stdout, stderr), "--stages", "2")
    assert done.status == 0, done.stderr
    whole = reference(*WHOLE, source=RICH)
    assert_same(done, whole)
    rows = [(run.path / "evaluation.jsonl").read_text() for run in (done, whole)]
    assert rows[0] == rows[1]


SLIP = (
    JOB
    + """
    def evaluation():
        yield from data()

    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().maen()}
"""
)


@slow
def test_a_late_mistake_loses_no_steps(jobs: Jobs) -> None:
    """It ends the job, whose steps are saved; the corrected job resumes from them."""
    words = ("--microbatches", "2", "--evaluate-every", "4", "--steps", "6")
    run = jobs.run("--stages", "2", *words, source=SLIP)
    assert run.status == 1, run.stderr
    assert "metrics() raised AttributeError: 'Tensor' object has no attribute 'maen'" in run.stderr
    # On a busy host the snapshot of the last step may be incomplete.
    saved = re.search("the job failed; step ([123]) is saved before it ends", run.stderr)
    assert saved, run.stderr
    assert f"checkpoints/step-0000000{saved[1]}, after step {saved[1]}" in run.stdout
    resume = "^resume: .* launch --resume --run-dir run-1 job.py$"
    assert re.search(resume, run.stdout, re.MULTILINE)
    assert "metrics() raised" in run.log("worker-0")  # the worker that saved logs why the job ended
    jobs.write(SLIP.replace("maen", "mean"))
    done = resumed(jobs, run)
    assert done.status == 0, done.stderr
    assert [row["step"] for row in done.metrics] == [*range(1, 7)]
    whole = jobs.train("--stages", "1", *words, source=SLIP.replace("maen", "mean"))
    assert_same(done, whole)


LOADER = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            with open("loaded", "a") as file:
                file.write(".")
            return torch.randn(4) + index, index % 3

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-2)

    def data():
        return DataLoader(Noisy(), batch_size=4, shuffle=True)
"""


def test_a_resumed_run_does_not_load_items_again(jobs: Jobs) -> None:
    """Five mini-batches of four items an epoch; the run is cut within the second one."""
    words = ("--microbatches", "2")
    uncut = jobs.train("--stages", "1", *words, "--steps", "7", source=LOADER)
    loaded = jobs.folder / "loaded"
    loaded.unlink()
    cut = jobs.train("--stages", "2", *words, "--steps", "6", source=LOADER)
    done = resumed(jobs, cut, "--stages", "1", "--steps", "7")
    assert done.status == 0, done.stderr
    assert_same(done, uncut)
    assert len(loaded.read_text()) == 7 * 4
