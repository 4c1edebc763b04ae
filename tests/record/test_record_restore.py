"""The state of a checkpoint in stages that did not write it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.record import checkpoint
from pipeworker.record.checkpoint import Checkpoint, Part
from pipeworker.record.manifest import Manifest, Shard, file_names
from pipeworker.record.restore import restore
from pipeworker.wire.messages.checkpoint import File
from pipeworker.worker.internals import loads_itself
from support.memory import peak, resident

optim, schedules = torch.optim, torch.optim.lr_scheduler
Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
TIE = {"6.weight": "3.weight"}


class Odd(nn.Module):
    """State of all kinds, all of which its output depends on."""

    table: torch.Tensor
    twisted: torch.Tensor
    new: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.calls = 0
        self.log: list[float] = []
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("twisted", torch.ones(8, 8).T.clone().T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(0.5 * self.calls)
        self.table = torch.cat([self.table, self.table[-1:] + 0.1])
        self.late = self.table.sum()
        self.twisted += 0.01
        if not hasattr(self, "new"):
            self.register_buffer("new", torch.zeros(()), persistent=False)
        self.new += 0.1
        factor = self.table.sum() * self.calls + sum(self.log) + self.late + self.new
        turned = (x.double() @ self.twisted.double()) * self.turn
        return x + 0.01 * (turned.abs() / factor).float()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "at": torch.tensor([self.calls])}

    def set_extra_state(self, state: Any) -> None:
        assert state["at"].tolist() == [state["calls"]]
        self.calls = state["calls"]


def add_log(module: Odd, state: Any, prefix: str, _: Any) -> None:
    if module.log:  # not before the first forward
        state[f"{prefix}log"] = list(module.log)


def take_log(module: Odd, state: Any, prefix: str, *_: Any) -> None:
    module.log = state.pop(f"{prefix}log", [])


def model(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    odd = Odd()
    hooked: Any = odd
    hooked.register_state_dict_post_hook(add_log)
    hooked.register_load_state_dict_pre_hook(take_log)
    frozen = nn.Linear(8, 8)
    frozen.requires_grad_(False)
    layers = [
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), odd, nn.Linear(8, 8), frozen, nn.Tanh()),
        *(nn.Linear(8, 8, bias=False), nn.Linear(8, 3)),
    ]
    return list(layers)


@dataclass
class Stages:
    """A model in parts, each with an optimizer of its own; tied weights as stages have them."""

    layers: list[nn.Module]
    cuts: Sequence[int]
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    step: int = 0
    rates: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranges = list(pairwise([0, *self.cuts, len(self.layers)]))
        self.first, self.later = (self.layers[i].get_parameter("weight") for i in (3, 6))
        with torch.no_grad():
            self.later.copy_(self.first)
        self.together = any(start <= 3 and stop > 6 for start, stop in self.ranges)
        if self.together:
            self.later.data = self.first.data
        self.elsewhere = set() if self.together else {id(self.later)}
        self.updates: list[tuple[Any, Any]] = []
        for start, stop in self.ranges:
            named = [
                (f"{index}.{name}", parameter)
                for index in range(start, stop)
                for name, parameter in self.layers[index].named_parameters()
                if not (parameter is self.later and self.together)
            ]
            trains = any(p.requires_grad for _, p in named)
            optimizer = self.optimizer(named) if trains else None
            scheduler = self.scheduler(optimizer) if optimizer and self.scheduler else None
            self.updates.append((optimizer, scheduler))

    def parts(self) -> list[Part]:
        return [
            Part(
                [str(index) for index in range(start, stop)],
                self.layers[start:stop],
                [layer.state_dict() for layer in self.layers[start:stop]],
                *(optimizer, scheduler and scheduler.state_dict(), scheduler),
            )
            for (start, stop), (optimizer, scheduler) in zip(self.ranges, self.updates, strict=True)
        ]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
            net = nn.Sequential(*self.layers)
            torch.autograd.backward(nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)))
            assert self.first.grad is not None
            assert self.later.grad is not None
            self.first.grad += self.later.grad
            self.later.grad.copy_(self.first.grad)
            for optimizer, scheduler in self.updates:
                if optimizer is not None:
                    optimizer.step()
                if isinstance(scheduler, schedules.ReduceLROnPlateau):
                    scheduler.step(1.0 if self.step < 2 else 2.0)
                elif scheduler is not None:
                    scheduler.step()
            net.zero_grad()
            self.step += 1

    def save(self, folder: Path) -> Checkpoint:
        """Each stage a worker."""
        files: list[File] = []
        for rank, part in enumerate(self.parts()):
            ranks = len(self.ranges)
            files += checkpoint.save_part(folder, rank, ranks, [part], self.elsewhere)
        names = tuple(map(str, range(len(self.layers))))
        manifest = Manifest(self.step, len(self.ranges), names, tuple(files))
        (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
        return Checkpoint(folder)

    def restore(self, shards: Sequence[Shard], step: int) -> None:
        for part in self.parts():
            restore(shards, [part], TIE)
        self.step = step

    def state(self) -> dict[str, Any]:
        """All that there is, by name, but what an alias has in place of the first."""
        found: dict[str, Any] = {}
        for part, (optimizer, _) in zip(self.parts(), self.updates, strict=True):
            found |= part.entries() | part.unlisted()
            for group in optimizer.param_groups if optimizer else ():
                by_id = {id(p): name for name, p in part.parameters().items()}
                for parameter in (p for p in group["params"] if p.requires_grad):
                    name = TIE.get(by_id[id(parameter)], by_id[id(parameter)])
                    kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                    found[f"{name} state"] = dict(optimizer.state[parameter])
                    found[f"{name} group"] = kept
        return found


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for key, value in enumerate(one):
            assert_same(value, other[key], f"{where}/{key}")
    else:
        assert one == other, where


def only(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def decayed(named: Named) -> list[dict[str, Any]]:
    """Two groups on every stage, one of them empty on some."""
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def by_name(named: Named) -> list[dict[str, Any]]:
    """Groups that not every stage has, in an order of their own on each."""
    rates = {"weight": 0.03, "bias": 0.01, "turn": 0.02}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        groups.setdefault(name.partition(".")[2], []).append((name, parameter))
    return [{"params": given, "lr": rates[kind]} for kind, given in groups.items()]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda named: optim.SGD(only(named), lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda named: optim.AdamW(only(named), lr=0.02),
    "amsgrad": lambda named: optim.Adam(only(named), lr=0.02, amsgrad=True),
    "Adagrad": lambda named: optim.Adagrad(only(named), lr=0.02),
    "tensor": lambda named: optim.Adam(only(named), lr=torch.tensor(0.02), foreach=False),
    "decay": lambda named: optim.AdamW(decayed(named), lr=0.01),
    "by name": lambda named: optim.AdamW(by_name(named), lr=0.01),
}


class Halved:
    """A callable with state of its own."""

    def __init__(self) -> None:
        self.asked = 0.0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 1 / self.asked


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    first = schedules.LinearLR(optimizer, 0.1, total_iters=2)
    later = schedules.LambdaLR(optimizer, lambda step: 0.9**step)
    return schedules.SequentialLR(optimizer, [first, later], [2])


def chain(optimizer: torch.optim.Optimizer) -> Any:
    one = schedules.ConstantLR(optimizer, 0.5, total_iters=4)
    return schedules.ChainedScheduler([one, schedules.ExponentialLR(optimizer, 0.9)])


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    momentum = {"momentum", "betas"} & optimizer.param_groups[0].keys()
    rates = [group["lr"] for group in optimizer.param_groups]
    return schedules.OneCycleLR(optimizer, rates, total_steps=20, cycle_momentum=bool(momentum))


SCHEDULERS: dict[str, MakeScheduler | None] = {
    "none": None,
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "OneCycleLR": one_cycle,
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, min_lr=0.001),
    "LambdaLR": lambda o: schedules.LambdaLR(o, [Halved() for _ in o.param_groups]),
}
CUTS = [(), (4,), (2, 5), (1, 3, 4, 6)]
PAIRS = [*permutations(CUTS, 2)]
STEPS = 3
CHOSEN = [
    *(("by name", scheduler) for scheduler in SCHEDULERS),
    *((optimizer, "SequentialLR") for optimizer in OPTIMIZERS),
    *(("decay", "ReduceLROnPlateau"), ("decay", "LambdaLR"), ("tensor", "LambdaLR")),
    *(("by name", "LambdaLR"),) * len(PAIRS),
]
CASES = [
    pytest.param(*chosen, pair, id=f"{', '.join(chosen)}, {pair[0]} to {pair[1]}")
    for chosen, pair in zip(CHOSEN, cycle(PAIRS))
]


@pytest.mark.parametrize(("optimizer", "scheduler", "pair"), CASES)
def test_training_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, optimizer: str, scheduler: str, pair: tuple[Sequence[int], Sequence[int]]
) -> None:
    make = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    before, after = pair
    first, uncut = Stages(model(0), before, *make), Stages(model(0), (), *make)
    first.train(STEPS)
    saved = first.save(tmp_path)
    second = Stages(model(1), after, *make)
    second.restore(saved.shards(), STEPS)
    assert_same(second.state(), first.state())
    second.train(STEPS)
    uncut.train(2 * STEPS)
    assert_same(second.state(), uncut.state())


def one_stage(seed: int = 0) -> Stages:
    return Stages(model(seed), (), OPTIMIZERS["AdamW"])


def test_a_worker_with_several_stages_and_files_without_names(tmp_path: Path) -> None:
    first = Stages(model(0), (2, 5), OPTIMIZERS["decay"])
    first.train(STEPS)
    shards = first.save(tmp_path).shards()
    held = [[os.memfd_create("shard") for _ in range(3)] for _ in shards]
    try:
        for shard, files in zip(shards, held, strict=True):
            for path, fd in zip((shard.model, shard.optimizer, shard.state), files, strict=True):
                os.write(fd, path.read_bytes())
                path.unlink()
        second = Stages(model(1), (4,), OPTIMIZERS["decay"])
        named = [Shard(*(Path(f"/proc/self/fd/{fd}") for fd in files)) for files in held]
        restore(named, second.parts(), TIE)
    finally:
        for fd in (fd for files in held for fd in files):
            os.close(fd)
    assert_same(second.state(), first.state())
    second.step = STEPS
    second.train(1)
    first.train(1)
    assert_same(second.state(), first.state())


def test_strides_and_memory_that_is_shared_stay(tmp_path: Path) -> None:
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
    parts = [
        Part(["0"], [net], [net.state_dict()], update)
        for net, update in zip((one, other), updates, strict=True)
    ]
    checkpoint.save_part(tmp_path, 0, 1, parts[:1])
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


def test_groups_that_are_empty_go_on_as_those_of_their_number(tmp_path: Path) -> None:
    class Own(schedules.LambdaLR):
        """With lists of its own: one has an item a group, one as many by chance."""

        def __init__(self, optimizer: torch.optim.Optimizer, floor: float) -> None:
            self.floors = [floor * (1 + i) for i in range(len(optimizer.param_groups))]
            self.marks = [floor] * 2
            super().__init__(optimizer, lambda step: 1 / (1 + step))

    def stage(first: int, floor: float, empty: bool) -> Part:
        layer = nn.Linear(2, 2, bias=False)
        groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": []}]
        optimizer = optim.SGD(groups if empty else groups[:1], lr=0.1)
        scheduler = Own(optimizer, floor)
        optimizer.step()
        scheduler.step()
        named = [str(first)], [layer], [layer.state_dict()]
        return Part(*named, optimizer, scheduler.state_dict(), scheduler)

    checkpoint.save_part(tmp_path, 0, 1, [stage(0, 1.0, empty=True)])
    same, fewer = stage(0, 2.0, empty=True), stage(0, 2.0, empty=False)
    for part in (same, fewer):
        assert part.optimizer
        part.optimizer.param_groups[-1]["lr"] = part.optimizer.param_groups[0]["lr"] = 7.0
        restore([shard_of(tmp_path)], [part])
        assert {group["lr"] for group in part.optimizer.param_groups} == {0.05}
        assert part.scheduler.marks == [1.0, 1.0]
    assert same.scheduler.floors == [1.0, 2.0]
    assert fewer.scheduler.floors == [1.0]


def test_a_rate_that_groups_share_stays_shared(tmp_path: Path) -> None:
    layer, rate = nn.Linear(2, 2), torch.tensor(0.5)
    optimizer = optim.SGD([{"params": [p]} for p in layer.parameters()], lr=rate)
    part = Part(["0"], [layer], [layer.state_dict()], optimizer)
    checkpoint.save_part(tmp_path, 0, 1, [part])
    rate.fill_(0.25)
    restore([shard_of(tmp_path)], [part])
    assert [group["lr"] is rate for group in optimizer.param_groups] == [True, True]
    assert rate == 0.5


def test_a_layer_judges_by_itself_what_it_has_besides_tensors_of_fixed_shapes(
    tmp_path: Path,
) -> None:
    class Log(nn.Module):
        """Its extra state is a tensor, of any shape, and at first there is none."""

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

    def of(number: int) -> Part:
        layer = Log()
        layer.found = torch.full((number,), 7.0) if number else None
        layer.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        return Part(["0"], [layer], [layer.state_dict()])

    checkpoint.save_part(tmp_path, 0, 1, [of(3)])
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
    checkpoint.save_part(tmp_path, 0, 1, [of(0)])
    part = of(2)
    restore([shard], [part])
    assert part.layers[0].get_extra_state() is None


class Observer(nn.Module):
    """As those of torch.ao.quantization: its buffer has a size when it has seen something."""

    seen: torch.Tensor

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(size)))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = state[f"{prefix}seen"]


def test_a_module_that_loads_its_buffers_itself_may_give_them_another_size(tmp_path: Path) -> None:
    def of(layer: nn.Module) -> Part:
        layers = [nn.Sequential(nn.Linear(2, 2), layer)]
        return Part(["0"], layers, [layer.state_dict() for layer in layers])

    checkpoint.save_part(tmp_path, 0, 1, [of(Observer(3))])
    shard, observer = shard_of(tmp_path), Observer()
    restore([shard], [of(observer)], loads_itself=loads_itself)
    with shard.model.open("r+b") as file:
        file.write(bytes(shard.model.stat().st_size))
    assert observer.seen.tolist() == [0, 1, 2]  # not in the file's memory
    checkpoint.save_part(tmp_path, 0, 1, [of(nn.BatchNorm1d(3, affine=False))])
    with pytest.raises(UsageError, match=r"of another shape or type are 0.1.running_mean \(\[3\]"):
        restore([shard], [of(nn.BatchNorm1d(2, affine=False))], loads_itself=loads_itself)


def shard_of(folder: Path, rank: int = 0, ranks: int = 1) -> Shard:
    return Shard(*(folder / name for name in file_names(rank, ranks)))


def test_a_worker_reads_its_own_part(tmp_path: Path) -> None:
    megabyte, count = 1 << 20, 8
    sizes = [[nn.Linear(1024, 1024, bias=False) for _ in range(2)] for _ in range(count)]
    for rank, layers in enumerate(sizes):
        optimizer = optim.Adam([p for layer in layers for p in layer.parameters()])
        for layer in layers:
            layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        names = [f"{rank}a", f"{rank}b"]
        part = Part(names, layers, [layer.state_dict() for layer in layers], optimizer)
        checkpoint.save_part(tmp_path, rank, count, [part])
        optimizer.zero_grad()
    own = sizes[3]
    sizes.clear()
    names = ["3b", "4a"]
    optimizer = optim.Adam([p for layer in own for p in layer.parameters()])
    part = Part(names, own, [layer.state_dict() for layer in own], optimizer)
    shards = [shard_of(tmp_path, rank, count) for rank in range(count)]
    peak()
    before = resident(os.getpid())
    restore(shards, [part])
    weights, state = 8 * megabyte, 16 * megabyte
    assert resident(os.getpid()) - before < state + 4 * megabyte
    # While it is read, a file's pages count as well; all files together have 192 MB.
    assert peak() - before < weights + 2 * state + 8 * megabyte


# What does not fit.


def test_all_that_does_not_fit_is_named_and_nothing_has_changed(tmp_path: Path) -> None:
    saved = one_stage().save(tmp_path)
    (shard,) = saved.shards()
    tensors = load_file(shard.model)
    del tensors["0.bias"], tensors["3.weight"], tensors["6.weight"]
    tensors["1.extra"] = torch.ones(2)
    tensors["7.weight"] = torch.ones(3, 9)
    tensors["1.running_mean"] = tensors["1.running_mean"].bfloat16()
    save_file(tensors, shard.model, {"names": json.dumps([*tensors]), "complex128": '["2.turn"]'})
    stages = one_stage(1)
    before = {name: value.clone() for name, value in weights_of(stages).items()}
    with pytest.raises(UsageError) as caught:
        restore([shard], stages.parts(), TIE)
    assert str(caught.value) == (
        f"the checkpoint {tmp_path} is of another model: it lacks 0.bias, 3.weight, 6.weight; "
        "the model does not have 1.extra; of another shape or type are 1.running_mean ([8] "
        "bfloat16 for [8] float32), 7.weight ([3, 9] float32 for [3, 8] float32)"
    )
    assert_same(weights_of(stages), before)


def weights_of(stages: Stages) -> dict[str, Any]:
    return {
        name: value
        for part in stages.parts()
        for name, value in part.entries().items()
        if isinstance(value, torch.Tensor)
    }


def test_of_many_names_some_are_shown(tmp_path: Path) -> None:
    wide = nn.ParameterDict({f"p{n:02}": nn.Parameter(torch.ones(1)) for n in range(20)})
    checkpoint.save_part(tmp_path, 0, 1, [Part(["0"], [nn.Linear(1, 1)], [{}])])
    with pytest.raises(UsageError, match=r"lacks 0\.p00, .*, 0\.p09 and 10 more$"):
        restore([shard_of(tmp_path)], [Part(["0"], [wide], [wide.state_dict()])])


def test_a_buffer_of_a_module_that_is_gone_is_named(tmp_path: Path) -> None:
    nested = nn.Sequential(Odd())
    checkpoint.save_part(tmp_path, 0, 1, [Part(["0"], [nested], [{}])])
    with pytest.raises(UsageError, match=r"the model does not have 0\.0\.table, 0\.0\.twisted$"):
        restore([shard_of(tmp_path)], [Part(["0"], [nn.Tanh()], [{}])])


def test_what_a_layer_itself_refuses_is_raised_as_it_is(tmp_path: Path) -> None:
    called: list[str] = []

    class Picky(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None:
            raise KeyError("mine")

    @contextmanager
    def users(who: str) -> Iterator[None]:
        called.append(who)
        yield

    layer = Picky(1, 1)
    part = Part(["head"], [layer], [layer.state_dict()])
    checkpoint.save_part(tmp_path, 0, 1, [part])
    with pytest.raises(KeyError, match="mine"):
        restore([shard_of(tmp_path)], [part], users=users)
    assert called == ["load_state_dict() of layer head (Picky)"]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "truncated weights": ("model", lambda whole: whole[:-1], r"it is damaged \("),
    "truncated state": ("optimizer", lambda whole: whole[:100], r"it is damaged \("),
    "no JSON": ("state", lambda whole: whole[:-1], "it is not what a stage writes"),
    "JSON of something else": ("state", lambda _: b'{"a": 1}', "it is not what a stage writes"),
    "a list": ("state", lambda _: b"[]", "it is not what a stage writes"),
    "no groups": (
        "state",
        lambda whole: whole.replace(b'"groups"', b'"g"'),
        "it is not what a stage writes",
    ),
    "no optimizer": (
        "state",
        lambda whole: whole.replace(b'"updates": [{', b'"updates": [1, {'),
        "it is not what a stage writes",
    ),
    "a tensor that is not there": (
        "state",
        lambda whole: whole.replace(b"0.bias/exp_avg", b"0.bias/other"),
        "it is not what a stage writes",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_named(tmp_path: Path, name: str) -> None:
    kind, change, message = DAMAGE[name]
    stages = one_stage()
    stages.train(1)
    saved = stages.save(tmp_path)
    (shard,) = saved.shards()
    path: Path = getattr(shard, kind)
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    assert path.read_bytes() != whole
    with pytest.raises(UsageError, match=f"cannot read {path}: {message}"):
        restore([shard], one_stage().parts(), TIE)
    with pytest.raises(UsageError, match=f"cannot read {path}: it "):
        saved.verify()
    path.unlink()
    with pytest.raises(UsageError, match=f"cannot read {path}: No such file"):
        restore([shard], one_stage().parts(), TIE)
