"""Whole pipelines in one process, one thread per worker, bitwise equal to the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.position import Phase
from pipeworker.plan import partition
from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, Kind
from pipeworker.plan.placement import Placement
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.device.device import EventStopwatch
from pipeworker.worker.stage.batchnorm import DeferredBatchNorm
from pipeworker.worker.step import executor
from support.draws import draws, some
from support.in_process.layers import Apply, Layer, data, mse
from support.in_process.pipelines import MODES, Pipeline, filled
from support.in_process.plain_loop import Batches, Loss, Trained, assert_equal, plain
from support.slow import mostly_slow


def fill_drain(
    layers: Sequence[nn.Module],
    batches: Any,
    *,
    balance: tuple[int, ...],
    recompute: str,
    loss: Loss = mse,
    microbatches: int = 3,
    **options: Any,
) -> Pipeline:
    """Build a pipeline with one stage per worker, in fill-drain order."""
    return Pipeline(
        layers,
        loss,
        batches,
        filled(Placement.identity(len(balance)), recompute),
        balance=balance,
        microbatches=microbatches,
        **options,
    )


def check(
    layers: Sequence[nn.Module],
    batches: Batches,
    *,
    balances: Sequence[tuple[int, ...]] | None = None,
    loss: Loss = mse,
    microbatches: int = 3,
    modes: Sequence[str] = MODES,
) -> Trained:
    """Compare every balance with the plain loop; return its result.

    In an ordinary run, the modes are divided among the balances.
    """
    expected = plain(copy.deepcopy(layers), loss, copy.deepcopy(batches), microbatches)
    if balances is None:
        balances = [partition.even(len(layers), k) for k in range(1, min(4, len(layers)) + 1)]
    for index, balance in enumerate(balances):
        every = min(len(balances), 4)
        for recompute in some(modes, every, index):
            pipeline = fill_drain(
                layers,
                copy.deepcopy(batches),
                loss=loss,
                balance=balance,
                microbatches=microbatches,
                recompute=recompute,
            )
            assert_equal(pipeline.train(len(batches)), expected, f"{balance} {recompute}")
    return expected


def mlp() -> list[nn.Module]:
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)]


@pytest.mark.parametrize("microbatches", [1, *mostly_slow([7, 2, 3], 3)])
def test_equals_the_plain_loop(microbatches: int) -> None:
    check(mlp(), data(7, 7, 7), microbatches=microbatches)


def test_mini_batches_of_changing_size_equal_the_plain_loop() -> None:
    check(mlp(), data(8, 5, 8, 2, 5), microbatches=4)


BLOCKS: list[Callable[[], list[nn.Module]]] = [
    lambda: [nn.Linear(4, 4)],
    lambda: [nn.Tanh()],
    lambda: [nn.Identity()],
    lambda: [nn.Linear(4, 4), nn.ReLU(inplace=True)],
    lambda: [nn.LayerNorm(4), nn.LeakyReLU(inplace=True)],
]


@settings(max_examples=draws(12), deadline=None)
@given(st.data())
def test_any_balance_mode_and_batch_equals_the_plain_loop(draw: st.DataObject) -> None:
    torch.manual_seed(draw.draw(st.integers(0, 9)))
    blocks = draw.draw(st.lists(st.sampled_from(BLOCKS), max_size=5))
    layers = [nn.Linear(4, 4), *(layer for block in blocks for layer in block())]
    inner = draw.draw(st.sets(st.integers(1, 10), max_size=3))
    cuts = [0, *sorted(cut for cut in inner if cut < len(layers)), len(layers)]
    balance = tuple(stop - first for first, stop in pairwise(cuts))
    microbatches = draw.draw(st.integers(1, 5))
    sizes = draw.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    mode = draw.draw(st.sampled_from(MODES))
    batches = data(*sizes, width=4, out=4)
    check(layers, batches, balances=[balance], microbatches=microbatches, modes=[mode])


def test_an_in_place_first_layer_equals_the_plain_loop() -> None:
    relu = nn.ReLU(inplace=True)
    layers = [nn.Linear(6, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2)]
    check(layers, data(6, 6), balances=[(1, 4), (1, 2, 2), (1, 2, 1, 1), (3, 2)])


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("balance", [(2,), (1, 1)])
def test_an_in_place_first_layer_does_not_change_the_data(
    recompute: str, balance: tuple[int, ...]
) -> None:
    layers = [nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Linear(6, 2)]
    x, y = data(6)[0]
    batch_x = x.clone()
    fill_drain(layers, [(batch_x, y)], balance=balance, recompute=recompute).train(1)
    assert torch.equal(batch_x, x)


def test_data_may_reuse_its_memory() -> None:
    """The next mini-batch is read while this one is still needed."""
    batches = data(5, 5, 5)

    def reused() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = (torch.empty_like(t) for t in batches[0])
        for new_x, new_y in batches:
            yield x.copy_(new_x), y.copy_(new_y)

    found = []
    for source in (batches, reused()):
        for recompute in MODES:
            torch.manual_seed(1)
            layers = [nn.Linear(6, 4), nn.Linear(4, 2)]
            trained = fill_drain(layers, source, balance=(1, 1), recompute=recompute).train(3)
            found.append(trained.losses)
            if source is not batches:
                break
    assert all(losses == found[0] for losses in found)


def test_identity_layers_and_layers_without_parameters() -> None:
    layers = [nn.Identity(), nn.Linear(6, 2), nn.Identity(), nn.Identity(), nn.Tanh()]
    check(layers, data(5, 5), balances=[(1, 4), (2, 1, 2), (1, 1, 1, 2), (2, 1, 1, 1)])


def test_integer_inputs_and_frozen_layers_get_no_gradient() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    layers = [nn.Identity(), nn.Embedding(10, 4), frozen, nn.Linear(4, 2)]
    batches = [(torch.randint(10, (6,)), torch.randn(6, 2)) for _ in range(2)]
    check(layers, batches)
    assert frozen.weight.grad is None
    all_frozen = [nn.Embedding(10, 4).requires_grad_(False), frozen, nn.Identity(), layers[3]]
    check(all_frozen, batches)


def test_unused_outputs_get_no_gradient() -> None:
    layers = [
        Apply("x", "used"),
        Apply("x", "unused"),
        Apply("used", "out", 6, 2),
        Layer(lambda value: value["out"]),
    ]
    batches = [({"x": x}, y) for x, y in data(6, 6)]
    expected = check(layers, batches)
    assert [grad is None for grad in expected.grads[0].values()] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_gradient_that_is_none_in_some_steps() -> None:
    """The gradient of a branch is None in some steps; the channel must not reuse a known shape."""

    def choose(value: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = value["a"]
        if value["flag"].any():
            out = out + value["b"]
        return out

    layers = [Apply("x", "a", 6, 2), Apply("x", "b", 6, 2), nn.Identity(), Layer(choose)]
    flags = [torch.zeros(6), torch.ones(6), torch.zeros(6), torch.tensor([0, 0, 1.0, 0, 0, 0])]
    batches = [
        ({"x": x, "flag": flag}, y) for (x, y), flag in zip(data(6, 6, 6, 6), flags, strict=True)
    ]
    check(layers, batches, microbatches=3)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * torch.as_tensor(x)


def test_a_custom_autograd_function_equals_the_plain_loop() -> None:
    layers = [nn.Linear(6, 6), Layer(Double.apply), nn.Linear(6, 2), Layer(Double.apply)]
    check(layers, data(5, 5))


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("balance", [(4,), (2, 2), (1, 1, 2)])
def test_a_layer_sees_the_strides_and_alignment_of_one_process(
    recompute: str, balance: tuple[int, ...]
) -> None:
    """Strides and alignment select the kernel, and so the last bits of its sums."""
    seen: list[Any] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, x.stride(), x.data_ptr() % 64))
        note = lambda grad: seen.append((grad.stride(), grad.data_ptr() % 64))  # noqa: E731
        x.register_hook(note)  # type: ignore[no-untyped-call]
        return x

    layers = [nn.Linear(6, 9), Layer(lambda x: x[:, 1::2]), Layer(note), nn.Linear(4, 2)]
    batches = data(7)
    plain(layers, mse, batches, 3)
    expected, seen = set(seen), []
    fill_drain(layers, batches, balance=balance, recompute=recompute).train(1)
    assert set(seen) == expected


@pytest.mark.parametrize("recompute", MODES)
def test_the_first_layer_sees_the_strides_and_alignment_of_the_data(recompute: str) -> None:
    seen: list[Any] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, x.stride(), x.data_ptr() % 64))
        return x

    layers = [Layer(note), nn.Linear(5, 2)]
    batches = [(torch.randn(7, 12)[:, 1:11:2], torch.randn(7, 2))]
    plain(layers, mse, batches, 3)
    expected, seen = set(seen), []
    fill_drain(layers, batches, balance=(2,), recompute=recompute).train(1)
    assert set(seen) == expected


def test_a_tensor_that_passes_through_all_stages() -> None:
    layers = [
        Apply("x", "h"),
        Apply("h", "h"),
        Layer(lambda v: {**v, "h": v["h"] + v["x"], "t": v["h"].t(), "same": v["h"]}),
        Layer(lambda v: v["h"] * v["t"].t() + v["same"]),
        nn.Linear(6, 2),
    ]
    check(layers, [({"x": x}, y) for x, y in data(6, 6)])


def test_the_next_mini_batch_is_read_in_the_gap() -> None:
    pipeline = fill_drain(mlp(), data(6, 4), balance=(2, 3), recompute="always")
    before = pipeline.executors[0].feed.next_batch
    assert before is not None
    assert (before.samples, before.microbatches, before.epoch) == (6, 3, 0)
    pipeline.step(1, last=False)
    after = pipeline.executors[0].feed.next_batch
    assert after is not None
    assert (after.samples, after.epoch, after.signature) == (4, 0, before.signature + 1)
    assert pipeline.executors[1].feed.next_batch is None


def test_after_the_last_step_nothing_is_read() -> None:
    def once() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield data(6)[0]
        pytest.fail("read beyond the last step")

    pipeline = fill_drain(mlp(), once, balance=(5,), microbatches=2, recompute="never")
    pipeline.step(1, last=True)
    assert pipeline.executors[0].feed.next_batch is None


def test_a_failure_in_a_stage_leaves_its_position_in_the_tracker() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    layers = [nn.Linear(6, 6), nn.Tanh(), Layer(fail), nn.Linear(6, 2)]
    pipeline = fill_drain(
        layers, data(6), balance=(1, 3), microbatches=2, recompute="always", limit=0.2
    )
    with pytest.raises(
        UserCodeError, match=r"layer 2 .* no \(its input was Tensor\[3, 6\] float32\)"
    ):
        pipeline.step(1, last=True)
    position = pipeline.stages[1].tracker.get()
    assert (position.phase, position.step, position.microbatch, position.layer) == (
        Phase.FORWARD,
        1,
        0,
        2,
    )


def test_a_loss_that_depends_on_no_parameter_is_rejected() -> None:
    layers = [nn.Linear(6, 2).requires_grad_(False)]
    pipeline = fill_drain(layers, data(6), balance=(1,), microbatches=2, recompute="always")
    with pytest.raises(UsageError, match="depends on no parameter that requires grad"):
        pipeline.step(1, last=True)


class Event:
    """A point in the work of a device: `given` is when it will have done what it was given."""

    now = given = 1.0

    def record(self) -> None:
        self.at = Event.given = max(Event.now, Event.given)

    def synchronize(self) -> None:
        Event.now = max(Event.now, self.at)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def test_a_device_performs_a_step_behind_the_update_that_it_was_given_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def commit(_: DeferredBatchNorm) -> None:
        Event.given += 3.0

    monkeypatch.setattr(Event, "now", 1.0)
    monkeypatch.setattr(Event, "given", 1.0)
    monkeypatch.setattr(DeferredBatchNorm, "commit", commit)
    monkeypatch.setattr(executor, "perf_counter", lambda: Event.now)
    monkeypatch.setattr(executor, "stopwatch_for", lambda _: EventStopwatch(Event))
    pipeline = fill_drain([nn.Linear(6, 2)], data(6, 6), balance=(1,), recompute="never")
    pipeline.step(1, last=False)
    Event.given += 50.0  # the update, which the host does not wait for
    (output,) = pipeline.step(2, last=True)
    assert output.times.times[0] == 54.0


def test_the_begin_and_end_of_every_action_are_recorded() -> None:
    """Those of sends and receives too; a layer's calls are between the times of its action."""
    calls: list[dict[str, list[float]]] = [{}, {}]

    def logged(log: dict[str, list[float]]) -> Layer:
        def note(name: str) -> None:
            log.setdefault(name, []).append(perf_counter())

        def call(x: torch.Tensor) -> torch.Tensor:
            note("forward")
            x.register_hook(lambda _: note("backward"))  # type: ignore
            return x

        return Layer(call)

    layers = [nn.Linear(6, 6), logged(calls[0]), nn.Linear(6, 2), logged(calls[1])]
    pipeline = fill_drain(layers, data(6, 6), balance=(2, 2), recompute="never")
    for step in (1, 2):
        began = perf_counter()
        outputs = pipeline.step(step, last=step == 2)
        for worker, output in enumerate(outputs):
            planned = tuple(pipeline.schedule(3).workers[worker])
            kinds = {action.kind for action in planned}
            assert kinds & RECEIVES.keys()
            assert kinds & SENDS.keys()
            recorded = output.times
            assert recorded.step == step
            assert began <= recorded.began <= recorded.times[0]
            assert len(recorded.times) == 2 * len(planned)
            assert recorded.times == tuple(sorted(recorded.times))
            busy = 0.0
            begins, ends = recorded.times[::2], recorded.times[1::2]
            for action, begin, end in zip(planned, begins, ends, strict=True):
                busy += (end - begin) * (action.kind in COMPUTE | {Kind.LOAD})
                if action.kind in COMPUTE:
                    name = "forward" if action.kind is Kind.FORWARD else "backward"
                    assert begin < calls[worker][name].pop(0) < end, action
            assert output.busy == pytest.approx(busy)
            assert calls[worker] == {"forward": [], "backward": []}
