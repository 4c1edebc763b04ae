"""Whole pipelines in one process, one thread per worker."""

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

from pipeworker.errors import PeerLost
from pipeworker.facts.connections import Skip
from pipeworker.host.position import Tracker
from pipeworker.host.task_thread import TaskThread
from pipeworker.job.file import JobFile
from pipeworker.plan import partition, ties
from pipeworker.plan.check import check as check_schedule
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.frozen import without_backwards
from pipeworker.plan.partition import block
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import OFFLOAD, with_fetches
from pipeworker.plan.schedule import Pairs, Schedule, edges, replica_edges
from pipeworker.plan.skips import between_stages, pairs
from pipeworker.trace.ring import Ring
from pipeworker.wire.messages.plan import StageRange
from pipeworker.wire.messages.step import RunStep, Update
from pipeworker.worker.data.reader import MicroBatches, Reader
from pipeworker.worker.data.splitting import concatenate_outputs
from pipeworker.worker.model.model import Model
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.offload import Copies, StreamCopies
from pipeworker.worker.stage.skips import StageSkips
from pipeworker.worker.stage.slots import is_same
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.step.batch_feed import BatchFeed
from pipeworker.worker.step.evaluation import EvaluationPass, Explain, PassFailed
from pipeworker.worker.step.executor import Executor, StepOutput
from pipeworker.worker.step.wiring import Wiring
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.update.ties import Ties
from pipeworker.worker.update.update import Updater
from support.devices.copies import LateCopies
from support.devices.device import LateDevice
from support.in_process.plain_loop import (
    Grads,
    Loss,
    MakeOptimizer,
    Trained,
    copy_grad,
    copy_weights,
)
from support.in_process.transport import MemoryLink, TakingTurns, two_lanes
from support.pure.orders import Orders, fill_drain

CPU = torch.device("cpu")
MODES = ("always", "except_first", "never", OFFLOAD)


@dataclass(frozen=True)
class Way:
    """A placement of stages, their compute orders by the number of micro-batches, frozen stages."""

    placement: Placement
    compute: Callable[[Placement, int], Orders]
    frozen: tuple[int, ...] = ()


@functools.cache
def filled(placement: Placement, mode: str = "never") -> Way:
    """Return the fill-drain (GPipe) order in a placement."""

    def compute(where: Placement, m: int) -> Orders:
        orders = fill_drain(where, m, mode)
        stages = range(where.stages)
        return [with_fetches(order, stages) for order in orders] if mode == OFFLOAD else orders

    return Way(placement, compute)


@functools.lru_cache(maxsize=1024)
def checked_schedule(way: Way, microbatches: int, skips: Pairs, tied: Pairs) -> Schedule:
    """Return the checked schedule for a number of micro-batches, from the cache if it is there."""
    compute, stages = way.compute(way.placement, microbatches), way.placement.stages
    if way.frozen:
        compute = [without_backwards(order, way.frozen, stages) for order in compute]
    schedule = connect("test", microbatches, way.placement, compute, skips, tied, way.frozen)
    check_schedule(schedule)
    return schedule


@dataclass
class Replica:
    """The layers and stages of one replica of the pipeline."""

    layers: list[nn.Module]
    stages: dict[int, Stage] = field(default_factory=dict)
    updaters: dict[int, Updater] = field(default_factory=dict)
    ties: dict[int, Ties] = field(default_factory=dict)


class Pipeline:
    """The stages of one model, connected by links in memory.

    Workers take turns, because they share the process's random generators: one computes until it
    waits.

    Args:
        devices: one per worker, instead of the CPU.

    Attributes:
        layers: layers of replica 0, each built from its worker's own copy of the model; `stages`,
            `updaters` and `ties` are those of replica 0 as well. `copies` has all replicas.
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
        optimizer: MakeOptimizer | None = None,
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
        job = JobFile(list(layers), loss, optimizer or _nothing, None, None, tied=tied)
        found = Model(job, 0, CPU, Tracker()).ties()
        self._tied = ties.placed(found, self._ranges)
        self._routes = between_stages(skips, self._ranges)
        self._deferred, self._compiler, self._sharded = deferred, compiler, sharded
        self._devices = devices
        most = len(block(microbatches, placement.replicas, 0))
        used = [(e, r) for e in edges(self.schedule(most)) for r in range(placement.replicas)]
        used += [(edge, -1) for edge in replica_edges(placement)]
        self._memory = [MemoryLink(limit) for _ in used] if lanes == 1 else []
        links: Sequence[Link] = self._memory or [two_lanes(limit) for _ in used]
        self._links = {
            key: TakingTurns(link, self._turn) for key, link in zip(used, links, strict=True)
        }
        self.copies = [Replica([nn.Identity()] * len(layers)) for _ in range(placement.replicas)]
        self.layers, self.stages = self.copies[0].layers, self.copies[0].stages
        self.updaters, self.ties = self.copies[0].updaters, self.copies[0].ties
        self.wirings: list[Wiring] = []
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
                self.executors[rank].feed.load()

    def _worker(self, rank: int, job: JobFile, loss: Loss, reader: Reader) -> None:
        placement, tracker = self.way.placement, Tracker()
        indices, replica = placement.stages_of(rank), placement.replica_of(rank)
        parts = self.copies[replica]
        model = Model(job, 0, CPU, tracker)
        for index in indices:
            first, stop = self._ranges[index]
            of_stage = [tie for tie in self._tied if index in tie.stages]
            built, tied = model.build(StageRange(index, first, stop), of_stage, indices)
            if self._devices:
                self._devices[rank].move(built)
            parts.layers[first:stop] = built
            parts.stages[index] = Stage(
                built,
                StageConfig(
                    index=index,
                    first=first,
                    seed=0,
                    device=CPU,
                    skips=StageSkips.of(self._routes, index),
                    deferred_batch_norm=self._deferred,
                    compiler=self._compiler,
                ),
                tracker,
                loss=loss if index == placement.stages - 1 else None,
                copies=self._copies(rank),
            )
            parts.stages[index].checks_outputs = not self._devices
            if tied is not None:
                parts.ties[index] = tied
            if job.optimizer is not _nothing:
                shard = (replica, placement.replicas) if self._sharded else (0, 1)
                parts.updaters[index] = Updater(
                    built, first, job, ties=tied, replica=shard[0], replicas=shard[1]
                )
        links = {
            edge: link
            for (edge, of), link in self._links.items()
            if {edge.source, edge.target} & set(indices)
            and (of == replica if edge.origin < 0 else replica in (edge.origin, edge.goal))
        }
        stages = {index: parts.stages[index] for index in indices}
        own_ties = {index: parts.ties[index] for index in indices if index in parts.ties}
        source = reader if 0 in indices else None
        device = self._devices[rank] if self._devices else None
        send_thread = TaskThread("send") if device else None
        wiring = Wiring(
            placement, stages, links, send_thread, own_ties, replica=replica, accelerator=device
        )
        self.wirings.append(wiring)
        last = placement.stages - 1 in indices
        feed = BatchFeed(tracker, wiring.scatter, source, moves_targets=last, accelerator=device)
        reader.lends = feed.copied
        self.executors.append(Executor(wiring, placement, feed, Ring()))

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
        """Return the checked schedule for a number of micro-batches."""
        return checked_schedule(self.way, microbatches, pairs(self._routes), ties.pairs(self._tied))

    def _run_all(self, run: Callable[[int], Any]) -> list[Any]:
        """Run on every worker; raise a primary error rather than one caused by a lost peer."""

        def run_in_turn(worker: int) -> Any:
            try:
                with self._turn, self._active(worker):
                    return run(worker)
            except BaseException:
                for link in self._memory:  # the others need not wait for it
                    link.lose()
                raise

        with ThreadPoolExecutor(len(self.executors)) as pool:
            futures = [pool.submit(run_in_turn, worker) for worker in range(len(self.executors))]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
            raise error
        for device in self._devices:
            device.drain()
        return [future.result() for future in futures]

    def step(
        self, step: int, last: bool, *, whole: bool = True, first: int = 0
    ) -> list[StepOutput]:
        """Run one step on all workers."""
        batch = self._first.feed.next_batch
        assert batch is not None
        placement = self.way.placement
        assert all(self.executors[rank].feed.next_batch == batch for rank in placement.ranks_of(0))

        def run(rank: int) -> StepOutput:
            own = block(batch.microbatches, placement.replicas, placement.replica_of(rank))
            actions = self.schedule(len(own)).workers[placement.worker_of(rank)]
            self.executors[rank].set_actions(actions)
            command = RunStep(step, batch, last, "", first, complete=whole)
            return self.executors[rank].run(command, compares=last)

        return self._run_all(run)

    def train(self, steps: int) -> Trained:
        trained = Trained()
        for step in range(1, steps + 1):
            results = self.step(step, last=step == steps)
            ends = self.way.placement.ranks_of(self.way.placement.stages - 1)
            for rank, result in enumerate(results):
                assert type(result.busy) is float  # messages distinguish it from an integer
                assert result.busy > 0 or len(self.copies) > 1  # it may have had nothing to do
                assert rank in ends or result.losses == result.counts == ()
            losses = tuple(loss for rank in ends for loss in results[rank].losses)
            counts = tuple(count for rank in ends for count in results[rank].counts)
            trained.losses.append(losses)
            trained.counts.append(counts)
            trained.grads.append(self.grads())
            self._assert_replicas_equal()
            for one in self.copies:
                for updater in one.updaters.values():
                    updater.apply(Update(step, divisor=sum(counts) or 1.0))
            if self._sharded:
                self._run_all(self._share_weights)
            if not self.updaters:
                self.clear()
        assert self._first.feed.next_batch is None
        self._assert_replicas_equal()
        trained.weights = copy_weights(self._named())
        return trained

    def _share_weights(self, rank: int) -> None:
        placement = self.way.placement
        updaters = self.copies[placement.replica_of(rank)].updaters
        indices = placement.stages_of(rank)
        self.wirings[rank].share_weights({i: updaters[i].shards for i in indices})

    def _assert_replicas_equal(self) -> None:
        """Assert that all replicas have equal gradients, weights and buffers."""
        first = [(p, p.grad) for layer in self.layers for p in layer.parameters()]
        buffers = [b for layer in self.layers for b in layer.buffers()]
        for one in self.copies[1:]:
            others = [p for layer in one.layers for p in layer.parameters()]
            for (parameter, grad), other in zip(first, others, strict=True):
                assert torch.equal(parameter, other)
                assert (grad is None) == (other.grad is None)
                assert grad is None or other.grad is None or torch.equal(grad, other.grad)
            copied = [b for layer in one.layers for b in layer.buffers()]
            assert all(is_same(a, b) for a, b in zip(buffers, copied, strict=True))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                yield f"{index}.{name}", parameter

    def grads(self) -> Grads:
        """Return the gradients by name; each use of a tied weight has the sum of all uses."""
        found: Grads = {name: copy_grad(parameter.grad) for name, parameter in self._named()}
        for index, of_stage in self.ties.items():
            for tie, (_, owner) in zip(of_stage.ties, of_stage.owners, strict=True):
                total = copy_grad(of_stage.total(owner))
                for name, stage in zip(tie.names, tie.stages, strict=True):
                    if stage == index:
                        found[name] = total
        return found

    def clear(self) -> None:
        for one in self.copies:
            for layer in one.layers:
                for parameter in layer.parameters():
                    parameter.grad = None

    def stream(
        self,
        step: int,
        batches: Iterable[Any],
        explain: Explain | None = None,
        failed: list[Exception] | None = None,
    ) -> list[tuple[Any, Any, int]]:
        """Run an evaluation pass; return output, target and samples of each micro-batch.

        With `explain` the errors of the user's code are added to `failed`.
        """
        schedule = forward_only(self.way.placement, pairs(self._routes))
        check_schedule(schedule)
        seen: list[tuple[Any, Any, int]] = []

        def run(worker: int) -> None:
            read: Iterator[MicroBatches] = iter(())
            if self.executors[worker] is self._first:
                source = Reader(batches, microbatches=self.microbatches, seed=0, epochs=1)
                read = iter(source.read, None)
            sink = _unexpected if worker != self._last else lambda *found: seen.append(found[:3])
            try:
                wiring, actions = self.wirings[worker], schedule.workers[worker]
                one = EvaluationPass(wiring, self.way.placement, actions, sink, explain)
                one.run(step, read)
            except PassFailed as error:
                assert failed is not None
                failed.append(error.error)

        self._run_all(run)
        return seen

    def predict(self, step: int, batches: Iterable[Any]) -> list[Any]:
        """Return the whole output as each worker receives it, by rank."""
        outputs = [output for output, _, _ in self.stream(step, batches)]
        return self._run_all(
            lambda w: self.executors[w].broadcast(
                concatenate_outputs(outputs) if w == self._last else None
            )
        )


def _nothing(parameters: Any) -> Any:
    raise AssertionError("a pipeline without an optimizer made an update")


def _unexpected(*_: Any) -> None:
    raise AssertionError("a worker without the last stage has an output")
