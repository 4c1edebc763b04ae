"""A worker alone: what it does between the messages of a coordinator."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeworker.environment import versions
from pipeworker.errors import UsageError
from pipeworker.facts.position import Phase
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import EpochEnded, Evaluate, EvaluationDone, Update, Wait
from support.in_process.single_worker import SingleWorker, restored_process

_restored_process = pytest.fixture(autouse=True)(restored_process)

JOB = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(1)
pairs = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))

def model(): return [nn.Linear(3, 1)]
loss = nn.functional.mse_loss
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
def data(): return DataLoader(pairs, batch_size=4, shuffle=True, generator=generator)
def evaluation(): return DataLoader(pairs, batch_size=5, shuffle=True, generator=generator)
def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1)
scheduler_interval = "epoch"
"""
_WITHOUT_LAYERS = """
class Net(nn.Linear):
    def forward(self, x):
        raise ValueError("a network without layers")

def model(): return Net(3, 1)
"""


def start_worker(folder: Path, text: str = JOB, **options: Any) -> SingleWorker:
    alone = SingleWorker()
    try:
        alone.begin(folder, text, **options)
    except BaseException:
        alone.worker.close()
        raise
    return alone


def evaluated(alone: SingleWorker) -> float:
    done = alone.worker.handle(Advance(Evaluate(0)))
    assert isinstance(done, EvaluationDone)
    assert done.result is not None
    return done.result.loss


def test_a_worker_reports_the_versions_that_are_recorded(tmp_path: Path) -> None:
    found = versions()
    names = start_worker(tmp_path).worker.hello().versions
    assert names[:2] == (f"pipeworker {found['pipeworker']}", f"torch {found['torch']}")
    assert f"{found['python']}.".startswith(names[2].removeprefix("Python ") + ".")


def test_an_evaluation_leaves_generators_of_the_users_own_as_they_were(tmp_path: Path) -> None:
    """Every evaluation is the same, and the data does not depend on how many there are."""
    positions, losses = [], []
    for count in (0, 2):
        alone = start_worker(tmp_path)
        losses += [evaluated(alone) for _ in range(count)]
        for step in range(1, 5):
            assert alone.batch is not None
            alone.step(step, alone.batch)
            alone.worker.handle(Advance(Wait(), Update(step)))
        positions.append(alone.worker.connected.position)
        alone.worker.close()
    assert losses[0] == losses[1]
    assert repr(positions[0]) == repr(positions[1])


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_whether_an_epoch_ends_with_the_last_step_is_seen_where_rates_depend_on_it(
    tmp_path: Path, interval: str
) -> None:
    alone = start_worker(tmp_path, JOB.replace('"epoch"', repr(interval)))
    assert alone.batch is not None
    done = alone.step(1, alone.batch, last=True)
    alone.worker.close()
    assert (done.batch is not None) == (interval == "epoch")


def test_it_says_how_long_an_epoch_is_where_the_data_does(tmp_path: Path) -> None:
    for data, length in (("", 3), ("\ndef data(): yield torch.randn(4, 3), torch.randn(4, 1)", 0)):
        alone = start_worker(tmp_path, JOB + data)
        alone.worker.close()
        assert alone.epoch_length == length


def test_a_layer_that_has_no_sizes_before_its_first_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"layer 0 \(LazyLinear\): has parameters without sizes"):
        start_worker(tmp_path, JOB.replace("nn.Linear(3, 1)", "nn.LazyLinear(1)"))


def test_a_state_of_the_data_that_no_checkpoint_holds_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    data = """
class Data:
    def __iter__(self): return iter([(torch.randn(4, 3), torch.randn(4, 1))])
    def state_dict(self): return {"at": self}
    def load_state_dict(self, state): pass
data = Data()
"""
    with pytest.raises(UsageError, match=r"data/source/at is a pipeworker_job\.job\.Data"):
        start_worker(tmp_path, JOB + data)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("evaluation = None", "has no evaluation"),
        (
            "scheduler = lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, 'max')",
            "ReduceLROnPlateau: its mode is 'max', and it is stepped with the evaluation loss",
        ),
    ],
)
def test_a_mistake_about_evaluations_is_named_before_the_first_step(
    tmp_path: Path, more: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        start_worker(tmp_path, f"{JOB}scheduler_interval = 'step'\n{more}\n")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("{'5': 'head'}", "names: '5' is in no layer"),
        ("{'0.word': 'embed'}", r"names: '0\.word': the layer has no word; it has weight, …"),
    ],
)
def test_a_name_for_files_that_no_layer_has_is_an_error(
    tmp_path: Path, names: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        start_worker(tmp_path, f"{JOB}names = {names}\n")


def test_a_scheduler_that_needs_evaluations_needs_the_option(tmp_path: Path) -> None:
    plateau = "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau"
    with pytest.raises(UsageError, match="ReduceLROnPlateau: needs evaluations"):
        start_worker(tmp_path, f"{JOB}{plateau}\n", evaluate_every=None)


def test_the_end_of_an_epoch_reaches_a_worker_that_is_disconnected(tmp_path: Path) -> None:
    """The rank has failed, or was interrupted, with the coordinator's reply on its way."""
    alone = start_worker(tmp_path)
    worker = alone.worker
    worker.disconnect()
    worker.finish(Advance(Wait(), EpochEnded(0)))
    assert worker.planned.stages.optimizers.learning_rate == pytest.approx(0.01)
    worker.close()


def test_a_worker_neither_saves_nor_restores_once_its_call_has_returned(tmp_path: Path) -> None:
    """A worker that saves is waited for, however long it takes."""
    alone = start_worker(tmp_path)
    worker, tracker = alone.worker, alone.tracker
    worker.handle(Advance(Save(0)))
    assert tracker.get().phase is Phase.SAVING
    worker.handle(Advance(Wait()))
    assert (tracker.get().phase, tracker.waiting) == (Phase.WAITING, True)
    with pytest.raises(IndexError):
        worker.connected.state.restore([])
    assert tracker.get().phase is Phase.RESTORING
    worker.close()


def test_a_checkpoint_has_the_strides_of_weights_that_have_been_replaced(tmp_path: Path) -> None:
    """A job file that has changed since gives the others their strides."""
    alone = start_worker(
        tmp_path, JOB.replace("nn.Linear(3, 1)", "nn.Linear(3, 3), nn.Linear(3, 1)")
    )
    stages = alone.worker.planned.stages
    assert stages.part(0).strides() == {}
    weight: Any = stages.stages[0].layers[0].weight
    weight.data = weight.data.t().contiguous().t()
    assert stages.part(0).strides() == {"0.weight": [1, 3]}
    alone.worker.close()


def test_a_worker_that_transfers_its_state_to_another_replica_does_not_wait(
    tmp_path: Path,
) -> None:
    """Two that wait on a slow line would count as a deadlock."""
    alone, seen = start_worker(tmp_path), []
    worker, tracker = alone.worker, alone.tracker
    tracker.wait(phase=Phase.CONNECTING)

    class Transfer:
        def share_state(self, _: object) -> None:
            seen.append((tracker.get().phase, tracker.waiting))

    reductions: Any = {0: Transfer()}
    worker.connected.state.transfer(1, reductions, None, present=True)
    assert seen == [(Phase.RESTORING, False)]
    worker.close()


def test_a_worker_that_is_closed_leaves_no_process_of_a_loader(tmp_path: Path) -> None:
    """A script goes on after its job, and may start others."""
    alone = start_worker(tmp_path, JOB.replace("batch_size=", "num_workers=1, batch_size="))
    assert multiprocessing.active_children()
    alone.worker.close()
    assert not multiprocessing.active_children()


def test_a_worker_that_cannot_cut_the_model_leaves_no_process_of_a_loader(tmp_path: Path) -> None:
    """It has read a mini-batch for that."""
    text = JOB.replace("batch_size=", "num_workers=1, batch_size=")
    with pytest.raises(Exception, match="a network without layers"):
        start_worker(tmp_path, text + _WITHOUT_LAYERS)
    assert not multiprocessing.active_children()


def scaled(alone: SingleWorker) -> None:
    alone.worker.planned.stages.stages[0].layers[0].weight.data.mul_(2)  # type: ignore[operator]


def other_rate(alone: SingleWorker) -> None:
    optimizer: Any = alone.worker.planned.stages.optimizers.returned
    optimizer.param_groups[0]["lr"] *= 1.001


def other_state(alone: SingleWorker) -> None:
    optimizer: Any = alone.worker.planned.stages.optimizers.returned
    (parameter,) = optimizer.param_groups[0]["params"][:1]
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(1, 3)


@pytest.mark.parametrize("change", [scaled, other_rate, other_state])
def test_a_script_that_changes_what_was_saved_is_noticed(
    tmp_path: Path, change: Callable[[SingleWorker], None]
) -> None:
    alone = start_worker(tmp_path, own_loop=True)
    assert not alone.worker.has_changed()  # nothing is saved yet
    alone.worker.handle(Advance(Save(0)))
    assert not alone.worker.has_changed()
    change(alone)
    assert alone.worker.has_changed()
    alone.worker.close()
