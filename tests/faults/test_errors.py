"""Each mistake has one clear message without a traceback of pipeworker's own frames."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import pipeworker
from support.real_jobs.jobs import Jobs, Run
from support.real_jobs.sources import JOB
from support.slow import slow

HOME = Path(pipeworker.__file__).parents[1]
OURS = tuple(f"{HOME / room}{os.sep}" for room in ("pipeworker", "launcher"))

FAULTY = """
    import os, signal, sys
    import torch
    from torch import nn

    WHERE, WHAT, STAGE, CALL = sys.argv[1:]

    def fault():
        if WHAT == "raise":
            raise ValueError("boom")
        if WHAT == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, WHAT))

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, count):
            ctx.count = count
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            ctx.count("backward")
            return gradient, None

    class Faulty(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage, self.calls = stage, {"forward": 0, "backward": 0}

        def count(self, where):
            if (where, self.stage, self.calls[where]) == (WHERE, int(STAGE), int(CALL)):
                fault()
            self.calls[where] += 1

        def forward(self, x):
            self.count("forward")
            return Watched.apply(x, self.count)

    def model():
        pairs = [(nn.Linear(8, 8), Faulty(stage)) for stage in range(3)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair))
""" + JOB[JOB.index("\n    def loss") :]
"""Layer 2 s + 1, on stage s of three, fails at a call of its forward or backward."""

THREE = ("--stages", "3", "--balance", "2,2,2", "--microbatches", "4", "--steps", "3")


def check_failed(run: Run, status: int) -> str:
    """The job failed with one message and nothing of ours in it; returns the message.

    A mistake (status 2) leaves nothing behind.
    """
    assert run.status == status, run.stderr
    assert len(re.findall("^error: ", run.stderr, re.MULTILINE)) == 1
    assert not any(path in run.stdout + run.stderr for path in OURS)
    for echo in ("closed", "reset", "nobody reported", "defect"):
        assert echo not in run.stderr
    if status == 2:
        assert not run.path.exists()
        return run.stderr.partition("error: ")[2]
    summary = run.summary
    assert summary["status"] == "failed"
    assert f"error: {summary['error']}\n" in run.stderr
    assert summary["steps"] == len(run.metrics)
    return str(summary["error"])


# A fault in a layer: the first, a middle and the last stage of three; any phase and micro-batch.


@pytest.mark.parametrize(
    ("where", "stage", "step", "microbatch", "more"),
    [
        ("forward", 1, 2, 3, ("--recompute", "never")),
        pytest.param("recompute", 1, 2, 2, ("--recompute", "always"), marks=slow),
        pytest.param("backward", 0, 2, 3, ("--recompute", "never"), marks=slow),
        pytest.param("backward", 2, 1, 2, ("--recompute", "always"), marks=slow),
    ],
)
def test_a_layer_that_raises(
    jobs: Jobs, where: str, stage: int, step: int, microbatch: int, more: tuple[str, ...]
) -> None:
    call = 4 * (step - 1) + microbatch
    if where == "recompute":  # a step is four forwards, then the four of the recompute
        call += 4 * step
    method = "forward" if where == "recompute" else where
    words = ("--", method, "raise", str(stage), str(call))
    run = jobs.run(*THREE, *more, *words, source=FAULTY)
    error = check_failed(run, 1)
    layer = f"layer {2 * stage + 1} (Faulty)"
    assert error.startswith(f"{layer} raised ValueError: boom")
    assert f"in {where}: stage {stage}, {layer}, micro-batch {microbatch}, step {step}" in error
    # The user's own traceback, with the line.
    assert re.search(r'File ".*job\.py", line \d+, in fault\n +raise ValueError\("boom"\)', error)
    assert run.summary["steps"] == step - 1


@pytest.mark.parametrize(
    ("where", "what", "stage", "how"),
    [
        pytest.param("forward", "exit", 0, "exited with status 3", marks=slow),
        ("backward", "SIGKILL", 0, "was killed by SIGKILL"),
        pytest.param("forward", "SIGSEGV", 2, "was killed by SIGSEGV", marks=slow),
    ],
)
def test_a_layer_that_ends_its_process(
    jobs: Jobs, where: str, what: str, stage: int, how: str
) -> None:
    more = ("--recompute", "never", "--max-restarts", "0")
    words = (*more, "--", where, what, str(stage), "6")
    error = check_failed(jobs.run(*THREE, *words, source=FAULTY), 1)
    assert error.startswith(f"the worker of stage {stage} {how}")
    layer = f"layer {2 * stage + 1} (Faulty)"
    assert f"in {where}: stage {stage}, {layer}, micro-batch 2, step 2" in error


# Everything else that the job file can do wrong while it runs.

TRAINING = {
    "shapes that do not fit": (
        "Linear(16, 3)",
        "Linear(15, 3)",
        1,
        r"layer 4 \(Linear\) raised RuntimeError: .*mat1 and mat2 shapes cannot be multiplied .*"
        r"its input was Tensor\[3, 16\] float32\)\n"
        r"  in forward: stage 1, layer 4 \(Linear\), micro-batch 0, step 1",
    ),
    "loss that is not a scalar": (
        "(output, target)\n\n",
        "(output, target, reduction='none')\n\n",
        2,
        r"loss\(output, target\) returned a tensor of shape \(3,\); return a scalar",
    ),
    "loss that is not a tensor": (
        "return nn.functional.cross_entropy(output, target)",
        "return 1.5",
        2,
        r"loss\(output, target\) returned a float; return a scalar tensor, or a pair",
    ),
    "optimizer that is none": (
        "return torch.optim.SGD(params, lr=0.1)",
        "return 'sgd'",
        2,
        r"optimizer\(params\) returned a str; return a torch\.optim\.Optimizer",
    ),
    "data without a mini-batch": (
        "range(6)",
        "range(0)",
        2,
        r"data\(\): is empty; yield at least one \(input, target\) mini-batch",
    ),
    "data that disagrees in the batch": (
        "yield x, (x",
        "yield x[_:], (x",
        2,
        r"data\(\): gave tensors that disagree in dim 0, the batch: \(9, 8\), \(10,\)",
    ),
    "loss that is wrong in its second step": (
        "yield x, (x",
        "yield x, (0.5 if _ else 1) * (x",
        1,
        r"loss\(\) raised RuntimeError: .*its output was Tensor\[3, 3\] float32, its target "
        r"Tensor\[3\] float32\)\n  in loss: stage 1, micro-batch 0, step 2",
    ),
    "data that raises": (
        "yield x, (x",
        "1 / (2 - _)\n            yield x, (x",
        1,
        r"data\(\) raised ZeroDivisionError: .*\n  in reading: stage 0, step 3"
        r"(.*\n)+.*1 / \(2 - _\)",
    ),
    "output that cannot travel": (
        "nn.Linear(16, 16)",
        "type('Odd', (nn.Module,), {'forward': lambda self, x: {'x': x, 'odd': {1, 2}}})()",
        1,
        r"a set cannot pass from one stage to the next: only tensors and plain values .* can"
        r".*; convert it in the layer, as by list\(\), item\(\) or str\(\)"
        r"(\n.*)?stage 0, .*micro-batch 0, step 1",
    ),
    "a buffer on two stages": (
        "return nn.Sequential(",
        "tied = nn.BatchNorm1d(8)\n        return nn.Sequential(tied, nn.ReLU(), tied, tied, tied)"
        "\n        return nn.Sequential(",
        2,
        r"--stages 2: more than the parts of model\(\), 1, that share no changing buffer; use "
        "--stages 1, or call a module with buffers once",
    ),
    "job file that raises": (
        "def model",
        "import nothing_of_the_sort\n\n    def model",
        2,
        r"the job file job\.py raised ModuleNotFoundError: No module named 'nothing_of_the_sort'"
        r"(.*\n)+.*import nothing_of_the_sort",
    ),
    "names that are missing": (
        "def optimizer(params)",
        "def optimiser(params)",
        2,
        r"job file .*job\.py: lacks the name optimizer; define model, loss, optimizer and",
    ),
}


ELSEWHERE = {
    *("shapes that do not fit", "loss that is not a tensor", "optimizer that is none"),
    *("data without a mini-batch", "data that disagrees in the batch", "data that raises"),
    *("output that cannot travel", "names that are missing", "a buffer on two stages"),
    "loss that is not a scalar",
}
"""Tests of one process assert these messages, or other jobs do."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow if name in ELSEWHERE else ()) for name in TRAINING]
)
def test_a_job_file_that_is_wrong(jobs: Jobs, name: str) -> None:
    old, new, status, expected = TRAINING[name]
    assert old in JOB
    source = JOB.replace(old, new)
    run = jobs.run("--stages", "2", "--microbatches", "4", source=source)
    error = check_failed(run, status)
    assert re.search(expected, error), error


NAN = JOB.replace(
    "cross_entropy(output, target)", "cross_entropy(output, target) * float('nan')", 1
)


@slow
def test_a_loss_that_is_not_finite_is_a_warning(jobs: Jobs) -> None:
    run = jobs.train("--stages", "1", "--steps", "2", source=NAN)
    assert "warning: loss is nan at step 1; training continues (--stop-on-nan" in run.stderr
    assert "error" not in run.stderr
    assert [str(row["loss"]) for row in run.metrics] == ["nan", "nan"]
    assert run.summary["status"] == "done"


def test_a_loss_that_is_not_finite_stops_the_run_if_requested(jobs: Jobs) -> None:
    run = jobs.run("--stages", "1", "--steps", "2", "--stop-on-nan", source=NAN)
    assert "loss is nan at step 1" in check_failed(run, 1)
    assert [row["step"] for row in run.metrics] == [1]


HANDLER = (
    JOB.replace("range(6)", "range(1000)")
    .replace("            yield x", "            time.sleep(0.5)\n            yield x")
    .replace("nn.Tanh()", "Alarm()")
    + """
    import signal, time

    def late(*_):
        raise RuntimeError("too late")

    class Alarm(nn.Tanh):
        def forward(self, x):
            if type(x) is torch.Tensor:  # else the job's survey runs it
                signal.signal(signal.SIGALRM, late)
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            return super().forward(x)
"""
)


def test_what_a_signal_handler_raises_is_the_job_files(jobs: Jobs) -> None:
    """The second stage then waits for the next mini-batch, in code that is pipeworker's."""
    run = jobs.run("--stages", "2", "--no-profile", source=HANDLER)
    assert "the job file raised RuntimeError: too late" in check_failed(run, 1)
    assert "a defect in pipeworker" not in run.stderr


UPDATE_FAILS = (
    JOB
    + """
    steps = 0

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            global steps
            steps += 1
            if steps == 3 and FAILS:
                raise ValueError("boom")
            super().step(closure)

    def optimizer(params):
        return Failing(params, lr=0.1)
"""
)


@pytest.mark.parametrize("stages", ["1", pytest.param("2", marks=slow)])
def test_a_step_whose_update_fails_is_no_step(jobs: Jobs, stages: str) -> None:
    """A run that is resumed makes the step, and has one row for it."""
    words = ("--stages", stages, "--microbatches", "2", "--steps", "5", "--checkpoint-every", "2")
    run = jobs.run(*words, source=UPDATE_FAILS.replace("FAILS", "True"))
    assert re.match("the optimizer raised ValueError: boom\n  in update: ", check_failed(run, 1))
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.summary["steps"] == 2
    (jobs.folder / "job.py").write_text(textwrap.dedent(UPDATE_FAILS.replace("FAILS", "False")))
    resumed = ("launch", "--resume", "--run-dir", str(run.path), str(jobs.folder / "job.py"))
    assert jobs.pipeworker(*resumed).returncode == 0
    assert [row["step"] for row in replace(run).metrics] == [1, 2, 3, 4, 5]


@slow
@pytest.mark.parametrize(
    ("words", "stage"), [(("--stages", "1"), 0), (("--stages", "2", "--schedule", "zbv"), 3)]
)
def test_before_update_that_raises_names_the_layer(
    jobs: Jobs, words: tuple[str, ...], stage: int
) -> None:
    fails = """
    steps = 0

    def before_update(params):
        global steps
        if params[0].shape == (3, 8):
            steps += 1
            assert steps < 2, "boom"

    def model():
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Tanh(), nn.Linear(8, 3))
    """
    run = jobs.run(*words, "--microbatches", "2", "--steps", "3", source=JOB + fails)
    error = check_failed(run, 1)
    assert error.startswith(
        "before_update() raised AssertionError: boom\n"
        f"  in update: stage {stage}, layer 5 (Linear), step 2\n"
    )


def test_optimizer_state_that_cannot_be_saved_is_reported_after_the_first_step(
    jobs: Jobs,
) -> None:
    """It is not left to the end, when the first checkpoint is written."""
    source = JOB.replace(
        "def optimizer(params):",
        """class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["seen"] = {1, 2}

    def optimizer(params):
        return Odd(params, lr=0.1)

    def another(params):""",
    )
    run = jobs.run("--stages", "2", "--steps", "9", "--max-restarts", "0", source=source)
    assert run.status == 1
    assert re.search(r"\d\.\w+/seen is a builtins\.set: a checkpoint holds tensors", run.stderr)
    assert run.summary["steps"] == 1


SURPRISES = """
    import torch
    from torch import nn

    def model():
        pretrained = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
        return [pretrained, nn.Linear(8, 4), lambda: nn.BatchNorm1d(4)]

    loss = nn.MSELoss()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        yield torch.ones(8, 8), torch.ones(8, 4)
"""


def test_silent_surprises_are_notes(jobs: Jobs) -> None:
    """With the default of eight micro-batches each has one sample, which batch norm rejects."""
    run = jobs.run("--stages", "2", source=SURPRISES)
    lines = run.stderr.splitlines()
    assert any(line.startswith("note: model(): 1 module is in eval mode") for line in lines)
    assert any(line.startswith("note: batch norm: normalizes each micro-batch") for line in lines)
    assert "layer 2 (BatchNorm1d) raised ValueError: Expected more than 1 value" in run.stderr
    assert "  batch norm: this micro-batch is too small; use fewer --microbatches" in run.stderr
    assert run.status == 1
    quiet = jobs.run(
        "--stages", "2", "--microbatches", "2", source=SURPRISES.replace(".eval()", "")
    )
    assert (quiet.status, quiet.stderr) == (0, "")
