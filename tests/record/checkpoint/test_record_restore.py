"""Restoring a checkpoint into other stages than those that wrote it."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.restore import restore
from pipeworker.record.checkpoint.snapshot_buffer import SnapshotBuffer
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory
from pipeworker.record.checkpoint.stage_state import (
    OptimizerState,
    StageState,
    _copied_expanded,
)
from pipeworker.worker.internals import loads_itself
from record.checkpoint.stages import (
    OPTIMIZERS,
    SCHEDULERS,
    TIE,
    Stages,
    assert_same,
    model,
    shard_of,
)
from support.in_process import checkpoints
from support.in_process.checkpoints import save_worker_files
from support.processes.memory import peak, resident
from support.slow import slow

optim, schedules = torch.optim, torch.optim.lr_scheduler
DOTTED = LayerNames(
    (
        *("model.embed", "model.embed.norm", "model.layers.0", "model.layers.1", "model"),
        *("model.act", "model.layers.1.mlp", "lm_head"),
    )
)
"""Layer names with dots; some names are the beginning of others."""
CUTS = [(), (4,), (2, 5), (1, 3, 4, 6)]
PAIRS = [*permutations(CUTS, 2)]
STEPS = 3
CHOSEN = [
    *(("by name", scheduler) for scheduler in SCHEDULERS),
    *((optimizer, "SequentialLR") for optimizer in OPTIMIZERS),
    *(("kinds", scheduler) for scheduler in SCHEDULERS),
    *(("decay", "ReduceLROnPlateau"), ("decay", "LambdaLR"), ("tensor", "LambdaLR")),
    *(("by name", "LambdaLR"),) * len(PAIRS),
]
CASES = [
    pytest.param(
        *(*chosen, pair),
        id=f"{', '.join(chosen)}, {pair[0]} to {pair[1]}",
        marks=slow if chosen in CHOSEN[:number] or (chosen[0] == "kinds" and number % 3) else (),
    )
    for number, (chosen, pair) in enumerate(zip(CHOSEN, cycle(PAIRS)))
]
"""By default each optimizer, scheduler and pair is in a case."""


def resume(folder: Path, pair: tuple[Sequence[int], Sequence[int]], *make: Any) -> Stages:
    """Train, save, restore into other stages and train on, with the same state throughout."""
    before, after = pair
    first, uncut = Stages(model(0), before, *make), Stages(model(0), (), *make)
    first.train(STEPS)
    saved = first.save(folder)
    second = Stages(model(1), after, *make)
    second.restore(saved.worker_files(), STEPS)
    assert_same(second.state(), first.state())
    second.train(STEPS)
    uncut.train(2 * STEPS)
    assert_same(second.state(), uncut.state())
    return second


@pytest.mark.parametrize(("optimizer", "scheduler", "pair"), CASES)
def test_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, optimizer: str, scheduler: str, pair: tuple[Sequence[int], Sequence[int]]
) -> None:
    resume(tmp_path, pair, OPTIMIZERS[optimizer], SCHEDULERS[scheduler])


@pytest.mark.parametrize("pair", [((2, 5), (4,)), ((), (1, 3, 4, 6)), ((1, 3, 4, 6), (2, 5))])
def test_layer_names_with_dots_resume_at_another_number_of_stages(
    tmp_path: Path, pair: tuple[Sequence[int], Sequence[int]]
) -> None:
    make = OPTIMIZERS["by name"], SCHEDULERS["SequentialLR"]
    second = resume(tmp_path, pair, *make, DOTTED)
    plain = Stages(model(0), (), *make)
    plain.train(2 * STEPS)
    bits = [nn.Sequential(*stages.layers).state_dict() for stages in (second, plain)]
    assert_same(bits[0], bits[1])
    weights = Checkpoint(tmp_path).weights()
    layers = [*dict.fromkeys(DOTTED.prefixes[DOTTED.split(name)[0]] for name in weights)]
    assert layers == [prefix for prefix in DOTTED.prefixes if prefix != "model.act"]
    assert torch.equal(weights["model.layers.1.weight"], weights["model.layers.1.mlp.weight"])
    assert "model.bias" in weights


def test_a_worker_with_several_stages_restores_from_unnamed_files() -> None:
    first = Stages(model(0), (2, 5), OPTIMIZERS["decay"])
    first.train(STEPS)
    memories = [SnapshotMemory() for _ in first.parts()]
    try:
        for part, memory in zip(first.parts(), memories, strict=True):
            SnapshotBuffer(memory).fill(STEPS, [part], first.elsewhere)
        second = Stages(model(1), (4,), OPTIMIZERS["decay"])
        restore([WorkerFiles(*memory.paths) for memory in memories], second.parts(), TIE)
    finally:
        for memory in memories:
            memory.close()
    assert_same(second.state(), first.state())
    second.step = STEPS
    second.train(1)
    first.train(1)
    assert_same(second.state(), first.state())


def test_strides_and_shared_memory_are_preserved(tmp_path: Path) -> None:
    class Net(nn.Module):
        table: torch.Tensor

        def __init__(self, value: float) -> None:
            super().__init__()
            conv: Any = nn.Conv2d(2, 3, 3)
            self.conv: nn.Module = conv.to(memory_format=torch.channels_last)
            self.register_buffer("table", torch.full((4,), value), persistent=False)
            self.register_buffer("part", self.table[:2], persistent=False)
            self.register_buffer("wide", torch.tensor([value]).expand(3), persistent=False)

    one, other = Net(1.0), Net(2.0)
    updates = [optim.Adam(net.parameters()) for net in (one, other)]
    one.conv(torch.randn(1, 2, 5, 5)).sum().backward()
    updates[0].step()
    parts = [checkpoints.part([net], 0, u) for net, u in zip((one, other), updates, strict=True)]
    save_worker_files(tmp_path, 0, 1, parts[:1])
    addresses = [p.data_ptr() for p in other.parameters()]
    restore([shard_of(tmp_path)], parts[1:])
    assert [p.data_ptr() for p in other.parameters()] == addresses
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
        assert left.stride() == right.stride()
        for key, value in updates[0].state[left].items():
            assert torch.equal(value, updates[1].state[right][key])
            assert value.stride() == updates[1].state[right][key].stride()
    assert other.table.tolist() == [1.0] * 4
    assert other.get_buffer("part").data_ptr() == other.table.data_ptr()
    assert other.get_buffer("wide").tolist() == [1.0] * 3


def test_optimizer_state_of_every_class_of_dict_is_restored(tmp_path: Path) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    updates = [optim.SGD(layer.parameters()) for layer in layers]
    parts = [
        checkpoints.part([one], 0, update) for one, update in zip(layers, updates, strict=True)
    ]
    state = {"seen": Counter(a=3), "last": OrderedDict(b=torch.ones(2)), "plain": {1: None}}
    updates[0].state[layers[0].weight] = state
    save_worker_files(tmp_path, 0, 1, parts[:1])
    restore([shard_of(tmp_path)], parts[1:])
    assert_same(updates[1].state[layers[1].weight], state)


def test_empty_groups_continue_the_saved_group_of_their_index(tmp_path: Path) -> None:
    class Own(schedules.LambdaLR):
        """A scheduler with two lists: one has an item for each group, one as many by chance."""

        def __init__(self, optimizer: torch.optim.Optimizer, floor: float) -> None:
            self.floors = [floor * (1 + i) for i in range(len(optimizer.param_groups))]
            self.marks = [floor] * 2
            super().__init__(optimizer, lambda step: 1 / (1 + step))

    def stage(first: int, floor: float, empty: bool) -> StageState:
        layer = nn.Linear(2, 2, bias=False)
        groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": []}]
        optimizer = optim.SGD(groups if empty else groups[:1], lr=0.1)
        scheduler = Own(optimizer, floor)
        optimizer.step()
        scheduler.step()
        update = OptimizerState(optimizer, scheduler.state_dict(), scheduler)
        return StageState(names, [layer], [layer.state_dict()], [update], first=first)

    names = LayerNames.numbered(2)
    save_worker_files(tmp_path, 0, 1, [stage(0, 1.0, empty=True)])
    same, fewer = stage(0, 2.0, empty=True), stage(0, 2.0, empty=False)
    for part in (same, fewer):
        (update,) = part.updates
        groups = update.optimizer.param_groups
        groups[-1]["lr"] = groups[0]["lr"] = 7.0
        restore([shard_of(tmp_path)], [part])
        assert {group["lr"] for group in groups} == {0.05}
        assert update.scheduler.marks == [1.0, 1.0]
    assert same.updates[0].scheduler.floors == [1.0, 2.0]
    assert fewer.updates[0].scheduler.floors == [1.0]


def test_schedulers_that_use_the_evaluation_loss_are_not_made_again(tmp_path: Path) -> None:
    restarts: list[int] = []

    def stage(steps: int, evaluations: int) -> StageState:
        layer = nn.Linear(2, 2)
        one, other = (optim.SGD([parameter], lr=0.1) for parameter in layer.parameters())
        by_step, by_loss = schedules.StepLR(one, 1), schedules.ReduceLROnPlateau(other)
        one.step()
        by_step.step()
        for _ in range(evaluations):
            by_loss.step(1.0)
        return StageState(
            LayerNames(("0",)),
            [layer],
            [layer.state_dict()],
            [
                OptimizerState(one, by_step.state_dict(), by_step),
                OptimizerState(other, by_loss.state_dict(), by_loss),
            ],
            steps=steps,
            restart_schedulers=restarts.append,
        )

    save_worker_files(tmp_path, 0, 1, [stage(4, 3)])
    part = stage(8, 0)
    restore([shard_of(tmp_path)], [part])
    assert restarts == [1]
    assert part.updates[1].scheduler.last_epoch == 3


def test_a_learning_rate_shared_by_groups_stays_shared(tmp_path: Path) -> None:
    layer, rate = nn.Linear(2, 2), torch.tensor(0.5)
    optimizer = optim.SGD([{"params": [p]} for p in layer.parameters()], lr=rate)
    part = StageState(
        LayerNames(("0",)), [layer], [layer.state_dict()], [OptimizerState(optimizer)]
    )
    save_worker_files(tmp_path, 0, 1, [part])
    rate.fill_(0.25)
    restore([shard_of(tmp_path)], [part])
    assert [group["lr"] is rate for group in optimizer.param_groups] == [True, True]
    assert rate == 0.5


def test_extra_state_is_left_to_the_layer(tmp_path: Path) -> None:
    class Log(nn.Module):
        """A module whose extra state is a tensor of any shape, or None at first."""

        _version = 3
        found: torch.Tensor | None = None

        def get_extra_state(self) -> Any:
            return self.found

        def set_extra_state(self, state: Any) -> None:
            self.found = state

        def _load_from_state_dict(self, *given: Any) -> None:
            assert given[2] == {"version": 3}
            load: Any = super()._load_from_state_dict
            load(*given)

    def of(number: int) -> StageState:
        layer = Log()
        layer.found = torch.full((number,), 7.0) if number else None
        layer.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        return StageState(LayerNames(("0",)), [layer], [layer.state_dict()])

    save_worker_files(tmp_path, 0, 1, [of(3)])
    shard = shard_of(tmp_path)
    for number in (0, 2):
        part = of(number)
        restore([shard], [part])
        state = part.layers[0].get_extra_state()
        assert torch.equal(state, torch.full((3,), 7.0))
        assert part.layers[0].get_buffer("graph").is_sparse  # as it was built: no file has it
    with shard.model.open("r+b") as file:
        file.write(bytes(shard.model.stat().st_size))
    assert torch.equal(state, torch.full((3,), 7.0))  # it is not in the file's memory
    save_worker_files(tmp_path, 0, 1, [of(0)])
    part = of(2)
    restore([shard], [part])
    assert part.layers[0].get_extra_state() is None


def test_a_buffer_that_is_none_at_first_is_restored(tmp_path: Path) -> None:
    def of(value: torch.Tensor | None) -> StageState:
        layer = nn.Linear(2, 2, bias=False)
        layer.register_buffer("scale", value)
        return StageState(LayerNames(("0",)), [layer], [layer.state_dict()])

    save_worker_files(tmp_path, 0, 1, [of(torch.full((3,), 7.0))])
    part = of(None)
    restore([shard_of(tmp_path)], [part])
    assert_same(part.layers[0].get_buffer("scale"), torch.full((3,), 7.0))


def test_buffers_that_forwards_register_or_resize_are_restored(tmp_path: Path) -> None:
    def of(**values: torch.Tensor) -> StageState:
        layer = nn.Linear(2, 2, bias=False)
        for name, value in values.items():
            layer.register_buffer(name, value)
        return StageState(
            LayerNames(("0",)),
            [layer],
            [layer.state_dict()],
            built_buffers=[{"rows": (torch.float32, (1,)), "kept": (torch.float32, (2,))}],
        )

    made = {"rows": torch.arange(3.0), "kept": torch.ones(2), "cache": torch.eye(2)}
    save_worker_files(tmp_path, 0, 1, [of(**made)])
    part = of(rows=torch.zeros(1), kept=torch.zeros(2))
    restore([shard_of(tmp_path)], [part])
    assert_same(part.layers[0].state_dict() | made, part.layers[0].state_dict())
    with pytest.raises(UsageError, match=r"does not have 0\.kept$"):  # the model has changed
        restore([shard_of(tmp_path)], [of(rows=torch.zeros(1))])


def test_buffers_that_forwards_made_of_one_tensor_are_one_again(tmp_path: Path) -> None:
    """A forward may change it in place under one name, and use it under another."""

    def of(**values: torch.Tensor) -> StageState:
        layers = [nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(2)]
        for name, value in values.items():
            index, key = name[1:].split("_", 1)
            layers[int(index)].get_submodule(key[0]).register_buffer(key[2:], value)
        states = [layer.state_dict() for layer in layers]
        return StageState(LayerNames(("0", "1")), layers, states, built_buffers=[built, {}])

    built = {"1.table": (torch.float32, (2,))}
    table, made, grown = torch.ones(2), torch.arange(3.0), torch.eye(2)
    names = {"_0_1_table": table, "_0_0_same": table, "_0_0_z": made, "_0_1_a": made}
    saved = of(**names, _1_0_made=made, _1_1_own=grown, _1_1_other=grown.clone())
    save_worker_files(tmp_path, 0, 1, [saved])
    part = of(_0_1_table=torch.zeros(2))
    restore([shard_of(tmp_path)], [part])
    first, second = part.layers
    for layer, whole in zip(part.layers, saved.layers, strict=True):
        assert_same(layer.state_dict(), whole.state_dict())
    assert first.get_buffer("0.same") is first.get_buffer("1.table")
    assert first.get_buffer("0.z") is first.get_buffer("1.a") is second.get_buffer("0.made")
    assert second.get_buffer("1.own") is not second.get_buffer("1.other")


def test_unlisted_buffers_that_forwards_made_of_one_tensor_are_one_again(tmp_path: Path) -> None:
    def of(**values: torch.Tensor | None) -> StageState:
        layers = [nn.Identity(), nn.Identity()]
        for name, value in values.items():
            layers[int(name[-1])].register_buffer(name, value, persistent=name.startswith("saved"))
        states = [layer.state_dict() for layer in layers]
        return StageState(LayerNames(("0", "1")), layers, states, built_buffers=[built, {}])

    built = {"saved0": (torch.float32, (2,))}
    saved, own, table = torch.ones(2), torch.eye(2), torch.arange(3.0)
    names = {"saved0": saved, "same0": saved, "z1": saved, "own0": own, "copy1": own.clone()}
    save_worker_files(tmp_path, 0, 1, [of(**names, table0=table, again0=table)])
    given = {"same0": None, "z1": torch.zeros(2), "own0": torch.zeros(2, 2)}
    part = of(saved0=torch.zeros(2), **given, copy1=None, table0=torch.zeros(3))
    restore([shard_of(tmp_path)], [part])
    first, second = part.layers
    assert first.get_buffer("same0") is first.get_buffer("saved0") is second.get_buffer("z1")
    assert first.get_buffer("again0") is first.get_buffer("table0")
    assert first.get_buffer("own0") is not second.get_buffer("copy1")
    for name, value in (*names.items(), ("table0", table)):
        assert torch.equal(part.layers[int(name[-1])].get_buffer(name), value)
    assert {*first.state_dict()} == {"saved0"}


def test_a_made_buffer_that_is_a_view_of_another_is_refused(tmp_path: Path) -> None:
    """A change of the other one would not reach it after a restore."""
    layer = nn.Identity()
    layer.register_buffer("whole", torch.arange(4.0))
    layer.register_buffer("part", layer.get_buffer("whole")[:2])
    built = [{"whole": (torch.float32, (4,))}]
    part = StageState(LayerNames(("0",)), [layer], [layer.state_dict()], built_buffers=built)
    save_worker_files(tmp_path, 0, 1, [part])
    own = nn.Identity()
    own.register_buffer("whole", torch.zeros(4))
    with pytest.raises(UsageError, match=r"does not have 0\.part$"):
        restore([shard_of(tmp_path)], [StageState(LayerNames(("0",)), [own], [own.state_dict()])])


def test_a_made_buffer_that_the_model_no_longer_saves_is_refused(tmp_path: Path) -> None:
    def of(*, persistent: bool) -> StageState:
        layer = nn.Identity()
        layer.register_buffer("cache", torch.ones(2), persistent=persistent)
        return StageState(LayerNames(("0",)), [layer], [layer.state_dict()], built_buffers=[{}])

    save_worker_files(tmp_path, 0, 1, [of(persistent=True)])
    with pytest.raises(UsageError, match=r"does not have 0\.cache$"):
        restore([shard_of(tmp_path)], [of(persistent=False)])


def test_statistics_of_a_norm_that_tracks_none_any_more_are_refused(tmp_path: Path) -> None:
    def of(*, tracks: bool) -> StageState:
        layer = nn.BatchNorm1d(2, track_running_stats=tracks)
        return StageState(LayerNames(("0",)), [layer], [layer.state_dict()])

    save_worker_files(tmp_path, 0, 1, [of(tracks=True)])
    with pytest.raises(UsageError, match=r"does not have 0\.running_mean"):
        restore([shard_of(tmp_path)], [of(tracks=False)])


class Observer(nn.Module):
    """A module like torch.ao.quantization's observers: data determines its buffer's size."""

    seen: torch.Tensor

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(size)))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = state[f"{prefix}seen"]


def test_a_module_that_loads_itself_may_resize_its_buffers(tmp_path: Path) -> None:
    def of(layer: nn.Module) -> StageState:
        return checkpoints.part([nn.Sequential(nn.Linear(2, 2), layer)], 0)

    save_worker_files(tmp_path, 0, 1, [of(Observer(3))])
    shard, observer = shard_of(tmp_path), Observer()
    restore([shard], [of(observer)], loads_itself=loads_itself)
    with shard.model.open("r+b") as file:
        file.write(bytes(shard.model.stat().st_size))
    assert observer.seen.tolist() == [0, 1, 2]  # not in the file's memory
    save_worker_files(tmp_path, 0, 1, [of(nn.BatchNorm1d(3, affine=False))])
    with pytest.raises(UsageError, match=r"of another shape or type are 0.1.running_mean \(\[3\]"):
        restore([shard], [of(nn.BatchNorm1d(2, affine=False))], loads_itself=loads_itself)


def test_a_module_of_torchscript_is_restored(tmp_path: Path) -> None:
    def of(layer: nn.Module) -> StageState:
        return StageState(LayerNames(("0",)), [layer], [layer.state_dict()])

    first, second = (torch.jit.script(nn.Sequential(nn.BatchNorm1d(2))) for _ in range(2))
    first(torch.randn(3, 2))
    save_worker_files(tmp_path, 0, 1, [of(first)])
    restore([shard_of(tmp_path)], [of(second)])
    assert_same(second.state_dict(), first.state_dict())


def test_a_layer_may_load_its_state_by_a_method_without_other_parameters(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
            return super().load_state_dict(state_dict)

    first, second = ([Own(4, 8), *model(seed)[1:]] for seed in range(2))
    saved = Stages(first, (2,), OPTIMIZERS["AdamW"]).save(tmp_path)
    Stages(second, (5,), OPTIMIZERS["AdamW"]).restore(saved.worker_files(), STEPS)
    assert_same(second[0].state_dict(), first[0].state_dict())


def test_a_worker_reads_only_its_own_state(tmp_path: Path) -> None:
    megabyte, count = 1 << 20, 8
    names = LayerNames(tuple(f"{rank}{which}" for rank in range(count) for which in "ab"))
    sizes = [[nn.Linear(1024, 1024, bias=False) for _ in range(2)] for _ in range(count)]
    for rank, layers in enumerate(sizes):
        optimizer = optim.Adam([p for layer in layers for p in layer.parameters()])
        for layer in layers:
            layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        states = [layer.state_dict() for layer in layers]
        part = StageState(names, layers, states, [OptimizerState(optimizer)], first=2 * rank)
        save_worker_files(tmp_path, rank, count, [part])
        optimizer.zero_grad()
    own = sizes[3]
    sizes.clear()
    optimizer = optim.Adam([p for layer in own for p in layer.parameters()])
    part = StageState(
        names, own, [layer.state_dict() for layer in own], [OptimizerState(optimizer)], first=7
    )
    shards = [shard_of(tmp_path, rank, count) for rank in range(count)]
    peak()
    before = resident(os.getpid())
    restore(shards, [part])
    weights, state = 8 * megabyte, 16 * megabyte
    assert resident(os.getpid()) - before < state + 4 * megabyte
    # Pages of a file count while it is read; all files together have 192 MB.
    assert peak() - before < weights + 2 * state + 8 * megabyte


def test_expanded_buffers_are_loaded_and_stay_expanded_where_they_can() -> None:
    layer: Any = nn.Module()
    layer.register_buffer("mask", torch.arange(4.0).expand(3, 4))
    layer.register_buffer("same", layer.mask)
    mask = layer.mask
    for values, stays in ((torch.ones(3, 4), True), (torch.rand(3, 4), False)):
        with _copied_expanded(layer):
            layer.load_state_dict({"mask": values, "same": values})
        assert layer.mask is layer.same
        assert (layer.mask is mask) is stays
        assert torch.equal(layer.mask, values)
