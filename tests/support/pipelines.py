"""Whole pipelines in one process, a thread a worker, and the plain loop they are held against."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import pipeworker
from pipeworker.errors import PeerLost
from pipeworker.host.position import Tracker
from pipeworker.job.file import Job
from pipeworker.plan import partition, ties
from pipeworker.plan.check import check as check_schedule
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.offload import fetched
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import OFFLOAD, Pairs, Schedule, between, edges, recomputed
from pipeworker.plan.shares import block
from pipeworker.plan.skips import Skip, between_stages, pairs
from pipeworker.wire.messages.plan import SkipRoute
from pipeworker.wire.messages.step import RunStep, Update
from pipeworker.worker.device.copies import Copies, StreamCopies
from pipeworker.worker.model.model import Model
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.stage import Skips, Stage
from pipeworker.worker.step.data import MicroBatches, Reader, joined
from pipeworker.worker.step.executor import Executor, Ran
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links.link import MemoryLink
from pipeworker.worker.update.ties import Ties
from pipeworker.worker.update.update import Updater
from support.copies import LateCopies
from support.device import LateDevice
from support.orders import Orders
from support.transport import TakingTurns, two_lanes

CPU = torch.device("cpu")
MODES = ("always", "except_first", "never", OFFLOAD)
Batches = Sequence[tuple[Any, Any]]
Grads = dict[str, "torch.Tensor | None"]
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Way:
    """Where stages are, and in which order they compute, by the number of micro-batches."""

    placement: Placement
    compute: Callable[[Placement, int], Orders]


@functools.cache
def filled(placement: Placement, mode: str = "never") -> Way:
    """Fill and drain."""

    def compute(where: Placement, m: int) -> Orders:
        orders = gpipe(where, m, recomputed(mode, m))
        return [fetched(order) for order in orders] if mode == OFFLOAD else orders

    return Way(placement, compute)


@functools.lru_cache(maxsize=1024)
def checked(way: Way, microbatches: int, skips: Pairs, tied: Pairs) -> Schedule:
    """What runs for a number of micro-batches. Ways that are made once are checked once."""
    compute = way.compute(way.placement, microbatches)
    made = connect("test", microbatches, way.placement, compute, skips, tied)
    check_schedule(made)
    return made


@dataclass
class Trained:
    """Losses and gradients of every step; weights at the end. A tied gradient is the whole one."""

    losses: list[tuple[float, ...]] = field(default_factory=list)
    counts: list[tuple[float, ...]] = field(default_factory=list)
    grads: list[Grads] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Copy:
    """A replica of it."""

    layers: list[nn.Module]
    stages: dict[int, Stage] = field(default_factory=dict)
    updaters: dict[int, Updater] = field(default_factory=dict)
    ties: dict[int, Ties] = field(default_factory=dict)


class Pipeline:
    """The stages of one model, joined by links in memory.

    Workers take turns: one computes until it waits, for the random generators are the process's.

    Args:
        devices: one a worker, instead of the CPU.

    Attributes:
        layers: as they were built, each worker's from a copy of its own; of replica 0, as `stages`,
            `updaters` and `ties`. Of the others they are in `copies`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Loss,
        batches: Any,
        way: Way,
        *,
        microbatches: int,
        balance: tuple[int, ...] | None = None,
        skips: Sequence[Skip] = (),
        tied: Sequence[Sequence[str]] = (),
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        lanes: int = 1,
        limit: float = 20.0,
        deferred: bool = False,
        compiler: str | None = None,
        sharded: bool = False,
        devices: Sequence[LateDevice] = (),
    ) -> None:
        placement, self.way, self.microbatches = way.placement, way, microbatches
        self._ranges = partition.ranges(balance or partition.even(len(layers), placement.stages))
        self._turn = threading.Lock()
        job = Job(list(layers), loss, optimizer or _nothing, None, None, tied=tied)
        found = Model(job, 0, CPU, Tracker()).ties()
        self._tied = ties.placed(found, self._ranges)
        self._routes = between_stages(skips, self._ranges)
        self._deferred, self._compiler, self._sharded = deferred, compiler, sharded
        self._devices = devices
        most = len(block(microbatches, placement.replicas, 0))
        used = [(e, r) for e in edges(self.schedule(most)) for r in range(placement.replicas)]
        used += [(edge, -1) for edge in between(placement)]
        self._links = {
            one: TakingTurns(MemoryLink(limit) if lanes == 1 else two_lanes(limit), self._turn)
            for one in used
        }
        self.copies = [Copy([nn.Identity()] * len(layers)) for _ in range(placement.replicas)]
        self.layers, self.stages = self.copies[0].layers, self.copies[0].stages
        self.updaters, self.ties = self.copies[0].updaters, self.copies[0].ties
        self.executors: list[Executor] = []
        for rank in range(placement.ranks):
            reader = Reader(
                batches,
                microbatches=microbatches,
                seed=0,
                epochs=None,
                replica=placement.replica_of(rank),
                replicas=placement.replicas,
            )
            self._worker(rank, copy.deepcopy(job), loss, reader)
        for rank in placement.ranks_of(0):
            with self._active(rank):
                self.executors[rank].load_first()

    def _worker(self, rank: int, job: Job, loss: Loss, reader: Reader) -> None:
        placement, tracker = self.way.placement, Tracker()
        held, replica = placement.stages_of(rank), placement.replica_of(rank)
        mine = self.copies[replica]
        model = Model(job, 0, CPU, tracker)
        for index in held:
            first, stop = self._ranges[index]
            of_stage = [tie for tie in self._tied if index in tie.stages]
            built, tied = model.build(first, stop, index, of_stage, held)
            if self._devices:
                self._devices[rank].take(built)
            mine.layers[first:stop] = built
            mine.stages[index] = Stage(
                built,
                first,
                index=index,
                seed=0,
                device=CPU,
                tracker=tracker,
                loss=loss if index == placement.stages - 1 else None,
                skips=Skips.of(
                    [SkipRoute(s.source, s.target, s.name) for s in self._routes], index
                ),
                deferred_batch_norm=self._deferred,
                compiler=self._compiler,
                copies=self._copies(rank),
            )
            if tied is not None:
                mine.ties[index] = tied
            if job.optimizer is not _nothing:
                shard = (replica, placement.replicas) if self._sharded else (0, 1)
                mine.updaters[index] = Updater(
                    built, first, job, ties=tied, replica=shard[0], replicas=shard[1]
                )
        links = {
            edge: link
            for (edge, of), link in self._links.items()
            if {edge.source, edge.target} & set(held)
            and (of == replica if edge.origin < 0 else replica in (edge.origin, edge.goal))
        }
        own = {index: mine.stages[index] for index in held}
        mine_tied = {index: mine.ties[index] for index in held if index in mine.ties}
        source = reader if 0 in held else None
        device = self._devices[rank] if self._devices else None
        courier = Courier() if device else None
        ends = (own, placement, links, source, courier, mine_tied)
        self.executors.append(Executor(*ends, replica=replica, accelerator=device))

    def _copies(self, rank: int) -> Copies:
        return StreamCopies(self._devices[rank], least=1) if self._devices else LateCopies()

    def _active(self, rank: int) -> AbstractContextManager[None]:
        return self._devices[rank].active() if self._devices else nullcontext()

    @property
    def _first(self) -> Executor:
        return self.executors[self.way.placement.owners[0]]

    @property
    def _last(self) -> int:
        return self.way.placement.owners[-1]

    def schedule(self, microbatches: int) -> Schedule:
        """What runs for a number of micro-batches; it has been checked."""
        return checked(self.way, microbatches, pairs(self._routes), ties.pairs(self._tied))

    def _all(self, run: Callable[[int], Any]) -> list[Any]:
        """On every worker; raises what one raised by itself, not as an echo of another."""

        def alone(worker: int) -> Any:
            with self._turn, self._active(worker):
                return run(worker)

        with ThreadPoolExecutor(len(self.executors)) as pool:
            futures = [pool.submit(alone, worker) for worker in range(len(self.executors))]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
            raise error
        for device in self._devices:
            device.settle()
        return [future.result() for future in futures]

    def step(self, step: int, last: bool, *, whole: bool = True, first: int = 0) -> list[Ran]:
        """Run one step on all workers."""
        batch = self._first.next_batch
        assert batch is not None
        placement = self.way.placement
        assert all(self.executors[rank].next_batch == batch for rank in placement.ranks_of(0))

        def run(rank: int) -> Ran:
            mine = block(batch.microbatches, placement.replicas, placement.replica_of(rank))
            actions = self.schedule(len(mine)).workers[placement.worker_of(rank)]
            self.executors[rank].program(actions)
            return self.executors[rank].run(RunStep(step, batch, last, "", first, whole=whole))

        return self._all(run)

    def train(self, steps: int) -> Trained:
        trained = Trained()
        for step in range(1, steps + 1):
            results = self.step(step, last=step == steps)
            ends = self.way.placement.ranks_of(self.way.placement.stages - 1)
            for rank, result in enumerate(results):
                assert result.busy > 0 or len(self.copies) > 1  # it may have had nothing to do
                assert rank in ends or result.losses == result.counts == ()
            losses = tuple(loss for rank in ends for loss in results[rank].losses)
            counts = tuple(count for rank in ends for count in results[rank].counts)
            trained.losses.append(losses)
            trained.counts.append(counts)
            trained.grads.append(self.grads())
            self._are_alike()
            for one in self.copies:
                for updater in one.updaters.values():
                    updater.apply(Update(step, divisor=sum(counts) or 1.0))
            if self._sharded:
                self._all(self._share)
            if not self.updaters:
                self.clear()
        assert self._first.next_batch is None
        self._are_alike()
        trained.weights = _copied(self._named())
        return trained

    def _share(self, rank: int) -> None:
        placement = self.way.placement
        updaters = self.copies[placement.replica_of(rank)].updaters
        held = placement.stages_of(rank)
        self.executors[rank].others.share_weights({index: updaters[index].shards for index in held})

    def _are_alike(self) -> None:
        """All replicas have the same gradients, weights and buffers."""
        first = [(p, p.grad) for layer in self.layers for p in layer.parameters()]
        buffers = [b for layer in self.layers for b in layer.buffers()]
        for one in self.copies[1:]:
            others = [p for layer in one.layers for p in layer.parameters()]
            for (mine, grad), other in zip(first, others, strict=True):
                assert torch.equal(mine, other)
                assert (grad is None) == (other.grad is None)
                assert grad is None or other.grad is None or torch.equal(grad, other.grad)
            copied = [b for layer in one.layers for b in layer.buffers()]
            assert all(torch.equal(a, b) for a, b in zip(buffers, copied, strict=True))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                yield f"{index}.{name}", parameter

    def grads(self) -> Grads:
        """By name; each place of a tied weight has the sum of all."""
        found: Grads = {name: _copy(parameter.grad) for name, parameter in self._named()}
        for index, held in self.ties.items():
            for tie, (_, owner) in zip(held.ties, held.owners, strict=True):
                total = _copy(held.total(owner))
                for name, stage in zip(tie.names, tie.stages, strict=True):
                    if stage == index:
                        found[name] = total
        return found

    def clear(self) -> None:
        for one in self.copies:
            for layer in one.layers:
                for parameter in layer.parameters():
                    parameter.grad = None

    def stream(self, step: int, batches: Iterable[Any]) -> list[tuple[Any, Any, int]]:
        """An evaluation pass: each micro-batch's output, target and samples."""
        schedule = forward_only(self.way.placement, pairs(self._routes))
        check_schedule(schedule)
        seen: list[tuple[Any, Any, int]] = []

        def run(worker: int) -> None:
            read: Iterator[MicroBatches] = iter(())
            if self.executors[worker] is self._first:
                source = Reader(batches, microbatches=self.microbatches, seed=0, epochs=1)
                read = iter(source.read, None)
            sink = _refuse if worker != self._last else lambda *given: seen.append(given)
            self.executors[worker].stream(step, schedule.workers[worker], read, sink)

        self._all(run)
        return seen

    def predict(self, step: int, batches: Iterable[Any]) -> list[Any]:
        """The whole output, as every worker gets it."""
        outputs = [output for output, _, _ in self.stream(step, batches)]
        return self._all(
            lambda w: self.executors[w].hand_back(joined(outputs) if w == self._last else None)
        )


def _nothing(parameters: Any) -> Any:
    raise AssertionError("nothing is updated")


def _refuse(*_: Any) -> None:
    raise AssertionError("an output where the last stage is not")


def _copy(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.clone()


def _copied(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named}


def split(value: Any, count: int) -> list[Any]:
    leaves, structure = pytree.tree_flatten(value)
    cut = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([piece[m] for piece in cut], structure) for m in range(count)]


def plain(
    layers: Sequence[nn.Module],
    loss: Loss,
    batches: Batches,
    microbatches: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> Trained:
    """The loop of the contract; without an optimizer nothing is updated."""
    net = nn.Sequential(*layers)
    opt = optimizer(net.parameters()) if optimizer else None
    trained = Trained()
    for step, (x, y) in enumerate(batches, 1):
        net.zero_grad()
        samples = len(pytree.tree_leaves(x)[0])
        losses: list[float] = []
        counts: list[float] = []
        count = min(microbatches, samples)
        for m, (xm, ym) in enumerate(zip(split(x, count), split(y, count), strict=True)):
            share = len(pytree.tree_leaves(xm)[0]) / samples
            for index, layer in enumerate(net):
                rng.seed_all(rng.layer_seed(0, step, m, index))
                xm = layer(xm)
            given = loss(xm, ym)
            if isinstance(given, tuple):
                root = given[0]
                counts.append(float(given[1]))
            else:
                root = given * share
            root.backward()
            losses.append(root.item())
        trained.losses.append(tuple(losses))
        trained.counts.append(tuple(counts))
        trained.grads.append({name: _copy(p.grad) for name, p in net.named_parameters()})
        if opt is not None:
            for parameter in net.parameters():
                if counts and parameter.grad is not None:
                    parameter.grad /= sum(counts)
            opt.step()
    trained.weights = _copied(net.named_parameters())
    return trained


def assert_equal(ours: Trained, theirs: Trained, case: str = "") -> None:
    """Without tolerance."""
    assert ours.losses == theirs.losses, case
    assert ours.counts == theirs.counts, case
    for step, (mine, yours) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
        assert mine.keys() == yours.keys()
        for name, a in mine.items():
            b = yours[name]
            assert (a is None) == (b is None), (case, step, name)
            if a is not None and b is not None:
                assert torch.equal(a, b), (case, step, name)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(weight, theirs.weights[name]), (case, name)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def data(*sizes: int, width: int = 6, out: int = 2) -> Batches:
    return [(torch.randn(n, width), torch.randn(n, out)) for n in sizes]


class Layer(nn.Module):
    """A layer from a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Apply(nn.Module):
    """A linear layer applied to one key of a dict."""

    def __init__(self, source: str, target: str, width: int = 6, out: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.source, self.target = source, target

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, self.target: self.linear(value[self.source])}


class Noise(nn.Module):
    """As dropout does: another draw in each micro-batch, the same when it is recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.3) + torch.rand(x.shape[1]) if self.training else x


class Stash(nn.Module):
    """Keeps what passes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipeworker.stash(self.name, x)
        return x


class Pop(nn.Module):
    """Adds what was kept."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + pipeworker.pop(self.name)
