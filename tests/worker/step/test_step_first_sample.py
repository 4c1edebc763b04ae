"""``metrics()`` and ``--best`` are checked on the first samples of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.stage import rng
from pipeworker.worker.step.first_sample import check_figures
from support.in_process.single_worker import SingleWorker, restored_process

_restored_process = pytest.fixture(autouse=True)(restored_process)


@pytest.mark.parametrize(
    ("found", "best", "mistake"),
    [
        ({"accuracy": 0.5}, "max:accuracy", ""),
        ({"accuracy": torch.ones(())}, "max:val/accuracy", ""),
        ({"accuracy": 0.5}, "val/loss", ""),
        (None, "loss", "metrics(output, target) returned a NoneType; return a dict of scalars"),
        (torch.ones(2), "loss", "metrics(output, target) returned a Tensor; return a dict of "),
        ({"m": torch.ones(2)}, "loss", "metrics(output, target) returned a Tensor of shape (2,)"),
        (
            {"m": torch.ones(()) * 1j},
            "loss",
            "metrics(output, target) returned a Tensor of shape () and torch.complex64",
        ),
        ({"loss": 1.0}, "loss", "metrics(output, target) named a value 'loss'"),
        (
            {"accuracy": 0.5},
            "max:acuracy",
            "--best max:acuracy: no evaluation has such a figure; use one of loss, accuracy, "
            "behind the name of its set where evaluation() returns a dict, as in NAME/accuracy, ",
        ),
        ({"accuracy": 0.5}, "inaccuracy", "--best inaccuracy: no evaluation has such a figure"),
        ({"a": numpy.float32(0.5), "b": numpy.int64(2), "c": True}, "a", ""),
        ({"a": 10**400}, "a", "metrics(output, target) returned an int under 'a'"),
    ],
)
def test_what_metrics_returns_is_checked(found: Any, best: str, mistake: str) -> None:
    check = check_figures(lambda *_: found, best)
    if not mistake:
        check(torch.ones(4, 2), torch.ones(4))
        return
    with pytest.raises(UsageError) as raised:
        check(torch.ones(4, 2), torch.ones(4))
    assert str(raised.value).startswith(mistake)


def test_a_metric_of_each_sample_is_no_scalar() -> None:
    """Nor are two of them a pair (sum, count)."""
    check = check_figures(lambda output, target: {"right": output == target}, "loss")
    with pytest.raises(
        UsageError, match=r"a Tensor of shape \(3,\) under 'right'; return a scalar"
    ):
        check(torch.ones(4), torch.ones(4))
    check = check_figures(lambda output, target: {"each": output.tolist()}, "loss")
    with pytest.raises(UsageError, match="returned a list under 'each'; return a scalar"):
        check(torch.ones(4), torch.ones(4))


def test_without_metrics_only_the_loss_has_a_name() -> None:
    check_figures(None, "min:loss")(torch.ones(4), None)
    with pytest.raises(UsageError, match=r"use one of loss, behind the name of"):
        check_figures(None, "accuracy")(torch.ones(4), None)


def test_the_check_changes_neither_tensors_nor_random_streams() -> None:
    seen: list[tuple[int, ...]] = []

    def metrics(output: Any, target: Any) -> dict[str, Any]:
        seen.extend((tuple(output["y"].shape), tuple(target.shape)))
        torch.rand(5), numpy.random.rand(5)
        assert not output["y"].requires_grad
        output["y"].zero_()
        target.zero_()
        return {"m": output["s"]}

    output = {"y": torch.ones(4, 2, requires_grad=True) * 1, "s": torch.ones(())}
    target = torch.ones(4, 3)
    stream = rng.Stream(None)
    before = stream.states()
    check_figures(metrics, "m")(output, target)
    assert seen == [(3, 2), (3, 3)]
    assert torch.equal(output["y"], torch.ones(4, 2))
    assert torch.equal(target, torch.ones(4, 3))
    after = stream.states()
    assert torch.equal(before[0], after[0])
    assert repr(before[2]) == repr(after[2])


def test_an_error_of_metrics_is_only_logged(capfd: pytest.CaptureFixture[str]) -> None:
    def metrics(output: Any, target: Any) -> Any:
        raise ValueError("one sample")

    check_figures(metrics, "accuracy")(torch.ones(4), torch.ones(4))
    assert "metrics(output, target) raised ValueError: one sample" in capfd.readouterr().err


JOB = """
import torch
from torch import nn
def model(): return [nn.Linear(6, 2)]
loss = nn.functional.mse_loss
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
def data():
    while True:
        yield torch.ones(4, 6), torch.ones(4, 2)
def evaluation(): return [(torch.ones(4, 6), torch.ones(4, 2))]
calls = []
def metrics(output, target):
    calls.append(len(output))
    return %s
"""


def test_a_mistake_shows_before_the_first_step_is_done(tmp_path: Path) -> None:
    alone = SingleWorker()
    batch = alone.begin(tmp_path, JOB % "output.mean()")
    assert batch
    with pytest.raises(UsageError, match=r"^metrics\(output, target\) returned a Tensor; return"):
        alone.step(1, batch)
    alone.worker.close()


def test_metrics_is_called_once_in_the_whole_training(tmp_path: Path) -> None:
    alone = SingleWorker()
    batch = alone.begin(tmp_path, JOB % "{'calls': len(calls)}")
    for step in (1, 2):
        assert batch
        batch = alone.step(step, batch).batch
    job = alone.worker.loaded.job
    alone.worker.close()
    assert job.metrics
    assert job.metrics(torch.ones(3, 2), None) == {"calls": 2}
