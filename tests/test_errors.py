"""Each mistake is one clear message: what, where, what to do; never a stack of our own frames."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import JOB, Jobs, Run
from torch import nn

import pipeworker
from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.worker.data import Reader

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
        pairs = [(nn.Linear(8, 8), Faulty(stage)) for stage in range(4)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair))
""" + JOB[JOB.index("\n    def loss") :]
"""Layer 2 s + 1 has its fault on stage s of four, at a call of its forward or backward."""

FOUR = ("--stages", "4", "--balance", "2,2,2,2", "--microbatches", "4", "--steps", "3")


def check_failed(run: Run, status: int) -> str:
    """The job failed with one message and nothing of ours in it; returns the message."""
    assert run.status == status, run.stderr
    assert len(re.findall("^error: ", run.stderr, re.MULTILINE)) == 1
    assert not any(path in run.stdout + run.stderr for path in OURS)
    for echo in ("closed", "reset", "nobody reported", "defect"):
        assert echo not in run.stderr
    summary = run.summary
    assert summary["status"] == "failed"
    assert f"error: {summary['error']}\n" in run.stderr
    assert summary["steps"] == len(run.metrics)
    return str(summary["error"])


# A fault in a layer: the first, a middle and the last stage of four; any phase and micro-batch.


@pytest.mark.parametrize(
    ("where", "stage", "step", "microbatch", "more"),
    [
        ("forward", 0, 1, 0, ("--recompute", "never")),
        ("forward", 2, 2, 3, ("--recompute", "never")),
        ("forward", 3, 2, 1, ("--recompute", "never")),
        ("recompute", 0, 1, 3, ("--recompute", "always")),
        ("recompute", 1, 2, 2, ("--recompute", "always")),
        ("backward", 0, 2, 3, ("--recompute", "never")),
        ("backward", 1, 1, 0, ("--recompute", "never")),
        ("backward", 3, 1, 2, ("--recompute", "always")),
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
    run = jobs.run(*FOUR, *more, *words, source=FAULTY)
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
        ("forward", "exit", 0, "exited with status 3"),
        ("backward", "exit", 3, "exited with status 3"),
        ("backward", "SIGKILL", 0, "was killed by signal 9"),
        ("forward", "SIGKILL", 2, "was killed by signal 9"),
        ("forward", "SIGSEGV", 3, "was killed by signal 11"),
    ],
)
def test_a_layer_that_ends_its_process(
    jobs: Jobs, where: str, what: str, stage: int, how: str
) -> None:
    words = ("--recompute", "never", "--", where, what, str(stage), "6")
    error = check_failed(jobs.run(*FOUR, *words, source=FAULTY), 1)
    assert error.startswith(f"the worker of stage {stage} {how}")
    layer = f"layer {2 * stage + 1} (Faulty)"
    assert f"in {where}: stage {stage}, {layer}, micro-batch 2, step 2" in error


# Everything else that the job file can do wrong while it runs.

TRAINING = {
    "shapes that do not fit": (
        "Linear(16, 3)",
        "Linear(15, 3)",
        1,
        r"layer 4 \(Linear\) raised RuntimeError: mat1 and mat2 shapes cannot be multiplied .*"
        r"its input was Tensor\[3, 16\] float32\)\n"
        r"  in forward: stage 1, layer 4 \(Linear\), micro-batch 0, step 1",
    ),
    "loss that is not a scalar": (
        "(output, target)\n\n",
        "(output, target, reduction='none')\n\n",
        2,
        r"loss\(output, target\) returned a tensor of shape \(3,\): it must be a scalar",
    ),
    "loss that is not a tensor": (
        "return nn.functional.cross_entropy(output, target)",
        "return 1.5",
        2,
        r"loss\(output, target\) returned a float: it must return a scalar tensor, or a pair",
    ),
    "loss that raises": (
        "return nn.functional.cross_entropy(output, target)",
        "return output[target.nothing]",
        1,
        r"loss\(\) raised AttributeError: .*nothing.*\n  in loss: stage 1, micro-batch 0, step 1"
        r"(.*\n)+.*return output\[target\.nothing\]",
    ),
    "optimizer that is none": (
        "return torch.optim.SGD(params, lr=0.1)",
        "return 'sgd'",
        2,
        r"optimizer\(params\) returned a str: it must return a torch\.optim\.Optimizer",
    ),
    "optimizer that raises in its step": (
        "return torch.optim.SGD(params, lr=0.1)",
        "params[0].register_hook(lambda g: None)\n"
        "        made = torch.optim.SGD(params, lr=0.1)\n"
        "        made.register_step_pre_hook(lambda *_: 1 / 0)\n"
        "        return made",
        1,
        r"the optimizer raised ZeroDivisionError: .*\n  in update: stage [01], step 1",
    ),
    "data without a mini-batch": (
        "range(6)",
        "range(0)",
        2,
        r"data\(\) is empty: it must yield at least one \(input, target\) mini-batch",
    ),
    "data that disagrees in the batch": (
        "yield x, (x",
        "yield x[_:], (x",
        2,
        r"data\(\) gave tensors that disagree in dim 0, the batch: \(9, 8\), \(10,\)",
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
        r".*(\n.*)?stage 0, .*micro-batch 0, step 1",
    ),
    "a buffer on two stages": (
        "return nn.Sequential(",
        "tied = nn.BatchNorm1d(8)\n        return nn.Sequential(tied, nn.ReLU(), tied, tied, tied)"
        "\n        return nn.Sequential(",
        2,
        r"layers [0-4] and [0-4] share a buffer but are on different stages.* --balance",
    ),
    "job file that raises": (
        "def model",
        "import nothing_of_the_sort\n\n    def model",
        2,
        r"the job file raised ModuleNotFoundError: No module named 'nothing_of_the_sort'"
        r"(.*\n)+.*import nothing_of_the_sort",
    ),
    "layer that cannot be built": (
        "return nn.Sequential(",
        "return [nn.ReLU(), lambda: nn.Linear(-1, 2)]\n        return nn.Sequential(",
        2,
        r"building layer 1 raised RuntimeError: .*negative.*(.*\n)+.*nn\.Linear\(-1, 2\)",
    ),
    "names that are missing": (
        "def optimizer(params)",
        "def optimiser(params)",
        2,
        r"job file .*job\.py lacks the name optimizer: it must define model, loss, optimizer and",
    ),
}


@pytest.mark.parametrize(
    ("old", "new", "status", "expected"), TRAINING.values(), ids=TRAINING.keys()
)
def test_a_job_file_that_is_wrong(
    jobs: Jobs, old: str, new: str, status: int, expected: str
) -> None:
    assert old in JOB
    source = JOB.replace(old, new)
    run = jobs.run("--stages", "2", "--microbatches", "4", source=source)
    error = check_failed(run, status)
    assert re.search(expected, error), error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--stages", "7"), "7 stages need at least 7 layers, but model() has 5: use --stages 5"),
        (("--stages", "2", "--balance", "2,2"), "--balance 2,2 adds up to 4 layers, but model()"),
    ],
)
def test_layers_and_stages_that_do_not_fit(
    jobs: Jobs, words: tuple[str, ...], expected: str
) -> None:
    assert expected in check_failed(jobs.run(*words), 2)


NAN = JOB.replace(
    "cross_entropy(output, target)", "cross_entropy(output, target) * float('nan')", 1
)


def test_a_loss_that_is_not_finite_is_a_warning(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--steps", "2", source=NAN)
    for step in (1, 2):
        assert f"warning: loss is nan at step {step}; training goes on (--stop-on-nan" in run.stderr
    assert "error" not in run.stderr
    assert [str(row["loss"]) for row in run.metrics] == ["nan", "nan"]
    assert run.summary["status"] == "done"


def test_a_loss_that_is_not_finite_stops_when_asked(jobs: Jobs) -> None:
    run = jobs.run("--stages", "2", "--steps", "2", "--stop-on-nan", source=NAN)
    assert "loss is nan at step 1" in check_failed(run, 1)
    assert [row["step"] for row in run.metrics] == [1]


# Mistakes seen before a process starts.


def launch(folder: Path, *words: str) -> Result:
    import cli

    path = folder / "job.py"
    if not path.exists():
        path.write_text(textwrap.dedent(JOB))
    return CliRunner().invoke(cli.main, ["launch", *words], prog_name="pipeworker")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--stages", "0"), "--stages 0: must be 1 or more"),
        (("--stages", "two"), "'two' is not a valid integer"),
        (("--microbatches", "0"), "--microbatches 0: must be 1 or more"),
        (("--steps", "0"), "--steps 0: must be 1 or more"),
        (("--threads", "0"), "--threads 0: must be 1 or more"),
        (("--seed", "-1"), "--seed -1: must be 0 or more"),
        (("--clip-grad-norm", "0"), "--clip-grad-norm 0.0: must be greater than 0"),
        (("--clip-grad-norm", "nan"), "--clip-grad-norm nan: must be greater than 0"),
        (("--worker-timeout", "0"), "--worker-timeout 0.0: must be greater than 0"),
        (("--schedule", "fastest"), "'fastest' is not "),
        (("--recompute", "maybe"), "'maybe' is not one of 'auto', 'always', 'except_first'"),
        (("--device", "tpu"), "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (("--backend", "mpi"), "'mpi' is not one of 'auto', 'gloo', 'nccl'"),
        (("--balance", "3,x"), "--balance '3,x' is not a list of layer counts"),
        (("--balance", "5,0"), "--balance '5,0' is not a list of layer counts"),
        (("--stagess", "2"), "No such option"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    run_dir = tmp_path / "run"
    result = launch(
        tmp_path, "--run-dir", str(run_dir), "--stages", "2", *words, str(tmp_path / "job.py")
    )
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        ("def model(:\n", "job.py, line 1: invalid syntax"),
        ("if True:\npass\n", "job.py, line 2: expected an indented block"),
        ("x = '\0'", "null bytes"),
    ],
)
def test_a_job_file_that_cannot_be_read(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "job.py"
    run_dir = tmp_path / "run"
    words = ("--run-dir", str(run_dir), "--stages", "2", str(path))
    path.write_text(content or "")
    if content is None:
        words = (*words[:-1], str(tmp_path / "other.py"))
    result = launch(tmp_path, *words)
    assert result.exit_code == 2
    assert re.match(f"error: job file .*{re.escape(expected)}", result.output), result.output
    assert not run_dir.exists()


def test_a_run_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("precious")
    words = ("--stages", "2", str(tmp_path / "job.py"))
    result = launch(tmp_path, "--run-dir", str(run_dir), *words)
    assert result.exit_code == 2
    assert f"run directory {run_dir} exists already: choose another --run-dir" in result.output
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
    result = launch(tmp_path, "--run-dir", str(run_dir / "metrics.jsonl" / "deeper"), *words)
    assert result.exit_code == 2
    assert "cannot make run directory" in result.output


def test_stages_must_be_said_without_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = launch(tmp_path, str(tmp_path / "job.py"))
    assert result.exit_code == 2
    assert "no accelerator: say how many stages with --stages" in result.output


# The names of a job file, one by one.


def job(**names: Any) -> ModuleType:
    module = ModuleType("job")
    good = {
        "model": lambda: [nn.Linear(2, 2)],
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD,
        "data": list,
    }
    vars(module).update(good, **names)
    return module


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "data"])
def test_a_name_that_is_missing(name: str) -> None:
    module = job()
    delattr(module, name)
    with pytest.raises(UsageError, match=rf"job file j\.py lacks the name {name}: it must define"):
        job_file.check(module, "job file j.py")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", 3, "model in job file j.py is a int: it must be an nn.Sequential, a list"),
        ("model", nn.Linear(2, 2), "model in job file j.py is a Linear: it must be"),
        ("loss", None, "loss in job file j.py is a NoneType: it must be a function"),
        ("optimizer", "adam", "optimizer in job file j.py is a str: it must be a function"),
        ("scheduler", 0.5, "scheduler in job file j.py is a float: it must be a function"),
        ("data", 7, "data in job file j.py is a int: it must be an iterable of (input, target)"),
    ],
)
def test_a_name_of_the_wrong_kind(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        job_file.check(job(**{name: value}), "job file j.py")


class _OwnForward(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: None, "model() returned a NoneType: it must return an nn.Sequential or a list"),
        (lambda: nn.Linear(2, 2), "model() returned a Linear: it must return an nn.Sequential"),
        (list, "model() returned no layers"),
        ([nn.ReLU(), 3], "layer 1 of model() is a int: each must be an nn.Module or a function"),
        (_OwnForward(nn.ReLU()), "a forward of its own, which a pipeline cannot cut"),
    ],
)
def test_a_model_that_is_no_sequence_of_layers(model: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        job_file.entries(job_file.check(job(model=model), "job file j.py"))


def test_a_layer_that_builds_something_else() -> None:
    with pytest.raises(UsageError, match=r"layer 4 of model\(\) was built as a dict: it must be"):
        job_file.build(dict, 4)  # type: ignore[arg-type]


X, Y = torch.zeros(4, 2), torch.zeros(4)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], "data() is empty"),
        (lambda: None, "data() gave a NoneType: it must be an iterable of (input, target)"),
        ([X], "data() gave a Tensor: it must be a pair (input, target)"),
        ([(X, Y, Y)], "data() gave a tuple of 3: it must be a pair (input, target)"),
        ([(X, Y[:3])], "disagree in dim 0, the batch: (4, 2), (3,)"),
        ([({"a": X, "b": X[:1]}, Y)], "disagree in dim 0, the batch: (4, 2), (1, 2), (4,)"),
        ([(X, torch.tensor(1.0))], "a tensor without dims: dim 0 of every tensor is the batch"),
        ([(X[:0], Y[:0])], "a mini-batch without samples"),
        ([("text", Y)], "an input without a tensor"),
    ],
)
def test_data_that_is_wrong(data: Any, expected: str) -> None:
    reader = Reader(data, microbatches=2, seed=0, repeat=False)
    with pytest.raises(UsageError, match=re.escape(expected)):
        reader.read()


def test_data_that_gives_nothing_when_started_again() -> None:
    reader = Reader(iter([(X, Y)]), microbatches=2, seed=0, repeat=True)
    assert reader.read() is not None
    with pytest.raises(UsageError, match="make data a function, so that each epoch gets a fresh"):
        reader.read()
