"""The loop that runs a worker's actions: the very tuple that was checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import compress
from operator import sub
from time import perf_counter
from typing import Any

from pipeworker.plan.actions import (
    BUSY,
    INPUTS,
    RECEIVES,
    SENDS,
    WEIGHTS,
    Action,
    Edge,
    Kind,
    Payload,
    channel,
    edge_of,
)
from pipeworker.plan.columns import columns_of, peak_live
from pipeworker.plan.partition import block
from pipeworker.plan.placement import Placement
from pipeworker.trace.ring import MiniBatchTimes, Ring
from pipeworker.wire.messages.step import RunStep
from pipeworker.worker.data.reader import MicroBatches, sample_shares
from pipeworker.worker.device.device import EventStopwatch, MemoryGauge, stopwatch_for
from pipeworker.worker.stage import losses
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.values import distinct_tensors
from pipeworker.worker.step.batch_feed import BatchFeed
from pipeworker.worker.step.profiler import labelled
from pipeworker.worker.step.stage_channels import Handler, StageChannels, waiting_handler
from pipeworker.worker.step.wiring import Wiring
from pipeworker.worker.stray_children import end_stray_child, stray

Instruction = tuple[Handler, int, bool]
"""The handler of an action, the number of its micro-batch, and whether a device performs it."""

_COMPUTES: dict[Kind, Callable[[StageChannels], Handler]] = {
    Kind.FORWARD: lambda channels: channels.forward,
    Kind.RECOMPUTE: lambda channels: channels.recompute,
    Kind.FETCH: lambda channels: channels.fetch,
    Kind.BACKWARD: lambda channels: channels.backward,
    Kind.BACKWARD_INPUT: lambda channels: channels.backward_input,
    Kind.BACKWARD_WEIGHT: lambda channels: channels.backward_weight,
}


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of a worker for one mini-batch, which were checked, as the loop runs them.

    Attributes:
        number: identifies the program among those of the worker.
        busy: of each action, whether the worker computes or reads data in it.
        order: numbers of the frames that each receiver gets, in order.
        recompute, split_backward, offload: by stage, the micro-batches that are recomputed, whose
            backward is two actions, whose graphs are kept in the host's memory.
    """

    number: int = 0
    actions: Sequence[Action] = ()
    instructions: Sequence[Instruction] = ()
    busy: Sequence[bool] = ()
    order: dict[Edge, list[int]] = field(default_factory=dict)
    recompute: dict[int, frozenset[int]] = field(default_factory=dict)
    split_backward: dict[int, frozenset[int]] = field(default_factory=dict)
    offload: dict[int, frozenset[int]] = field(default_factory=dict)

    def microbatches(self, stage: int, weights: Sequence[float]) -> dict[int, MicroBatch]:
        """Return new micro-batches of a stage, of these shares in the mini-batch's samples."""
        recompute, split = self.recompute[stage], self.split_backward[stage]
        offload = self.offload[stage]
        return {
            m: MicroBatch(m, weight, m in recompute, m in split, m in offload)
            for m, weight in enumerate(weights)
        }


def compile_program(
    actions: Sequence[Action], wiring: Wiring, load: Handler, number: int, *, on_device: bool
) -> Program:
    """Find the handler of each action; `load` reads the next mini-batch.

    `on_device`: layers compute on a device with a clock of its own.
    """
    backward = {action.stage for action in actions if action.kind in INPUTS}
    handler = cache(partial(_handler, wiring, load, backward))
    instructions = [
        (handler(a.kind, a.stage, a.peer), a.microbatch, on_device and a.kind in BUSY)
        for a in actions
    ]
    order: dict[Edge, list[int]] = {
        e: list(wiring.ties[e.target].frames(e.source)) if e.payload is Payload.TIED else []
        for e in wiring.receivers
    }
    for action in actions:
        if action.kind in RECEIVES and action.kind is not Kind.RECEIVE_TIED:
            order[edge_of(action)].append(action.microbatch)
    flags = (
        {
            index: frozenset(a.microbatch for a in actions if a.kind is kind and a.stage == index)
            for index in wiring.stages
        }
        for kind in (Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.FETCH)
    )
    busy = [action.kind in BUSY for action in actions]
    return Program(number, actions, instructions, busy, order, *flags)


def _handler(
    wiring: Wiring, load: Handler, backward: Collection[int], kind: Kind, stage: int, peer: int
) -> Handler:
    """Return the handler of an action; `backward` are the stages that have one."""
    if kind is Kind.LOAD:
        return load
    channels, reductions = wiring.stages[stage], wiring.reductions
    match kind:
        case Kind.REDUCE_TIED:
            return lambda _: wiring.ties[stage].reduce(wiring.ties)
        case Kind.SCATTER:
            return waiting_handler(channels, reductions[stage].scatter)
        case Kind.SUM:
            return waiting_handler(channels, reductions[stage].sum)
        case Kind.GATHER:
            return waiting_handler(channels, reductions[stage].gather)
    if kind in SENDS or kind in RECEIVES:
        return wiring.handlers[channel(kind, stage, peer)]
    if kind is Kind.FORWARD and stage not in backward:
        return channels.forward_alone
    return _COMPUTES[kind](channels)


def _set_device_times(
    program: Program, times: memoryview[float], base: float, offsets: Sequence[float]
) -> None:
    """Set the times of what a device performed, from the offsets of its begins and ends."""
    places = [2 * n for n, (_, _, on_device) in enumerate(program.instructions) if on_device]
    for place, begin, end in zip(places, offsets[::2], offsets[1::2], strict=True):
        times[place], times[place + 1] = base + begin, base + end


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The losses and counts of a mini-batch by micro-batch, and when its actions were performed.

    Only the worker with the last stage has losses, and counts if ``loss`` returns pairs.

    Attributes:
        busy: seconds that the worker computed and read data.
    """

    losses: tuple[float, ...]
    counts: tuple[float, ...]
    busy: float
    times: MiniBatchTimes


class Executor:
    """The loop over the actions of one worker."""

    def __init__(self, wiring: Wiring, placement: Placement, feed: BatchFeed, ring: Ring) -> None:
        stage = next(iter(wiring.stages.values())).stage
        self._wiring, self._replicas = wiring, placement.replicas
        self._last = wiring.stages.get(placement.stages - 1)
        self._tracker = stage.tracker
        self._ring, self._device = ring, stage.device
        watch = stopwatch_for(stage.device)
        self._stopwatch = watch if isinstance(watch, EventStopwatch) else None
        self._idle: tuple[Any, float] | None = None
        """A mark that the device reached at once, because it was idle, and that moment. The update
        before a step is still under way when the device is given the first action."""
        self._program = Program()
        self._labels = False
        self.feed = feed

    @property
    def held(self) -> int:
        """Micro-batches that wait here for their backward, once for each stage. For any thread."""
        times, program = self._ring.unfinished(), self._program
        if times is None or times.program != program.number:
            return 0
        trained = {action.stage for action in program.actions if action.kind in WEIGHTS}
        done = program.actions[: len(times.times) // 2]
        begun = sum(a.kind is Kind.FORWARD and a.stage in trained for a in done)
        return begun - sum(action.kind in WEIGHTS for action in done)

    def set_actions(self, actions: Sequence[Action]) -> int:
        """Run these actions from the next step on; return the number of their program."""
        self._compile(actions, self._program.number + 1)
        return self._program.number

    def label(self, labels: bool) -> None:
        """Decide whether torch's profiler shows each action under its name."""
        self._labels = labels
        self._compile(self._program.actions, self._program.number)

    def _compile(self, actions: Sequence[Action], number: int) -> None:
        program = compile_program(
            actions, self._wiring, self.feed.load, number, on_device=self._stopwatch is not None
        )
        if self._labels:
            named = zip(program.instructions, actions, strict=True)
            labels = [(labelled(handle, str(a)), m, watch) for (handle, m, watch), a in named]
            program = replace(program, instructions=labels)
        self._program = program

    def planned_memory(self, stage: int) -> str:
        """Describe what the plan has a stage keep at once; "" without a plan."""
        actions = self._program.actions
        if not actions:
            return ""
        graphs, inputs, _ = peak_live(columns_of(actions), stage, len(actions))
        kept = f"{graphs} graph{'s' * (graphs > 1)} and {inputs} input{'s' * (inputs > 1)}"
        return f"the plan has stage {stage} keep {kept} of micro-batches at once"

    def run(self, run: RunStep, *, compares: bool = False) -> StepOutput:
        """Run one mini-batch: accumulate gradients, update nothing.

        With `compares` replicas compare their weights, at the next reduction of their gradients.

        Raises:
            PeerLost: a channel closed.
            UserCodeError: the user's code raised; the tracker has the position.
        """
        self._begin(run, compares=compares)
        program, ring, began = self._program, self._ring, perf_counter()
        count = len(program.instructions)
        times = ring.begin(run.step, run.first, program.number, count, began)
        marks: list[Any] = []
        mark, now, at = self._stopwatch.mark if self._stopwatch else None, perf_counter, 0
        if mark is not None and self._idle is None:
            self._idle = mark(), now()
        memory: list[int] = []
        with closing(MemoryGauge(self._device)) if run.recorded else nullcontext() as used:
            for handle, microbatch, on_device in program.instructions:
                times[at] = now()
                if mark is not None and on_device:
                    marks.append(mark())
                    handle(microbatch)
                    marks.append(mark())
                else:
                    handle(microbatch)
                if stray:
                    end_stray_child()
                times[at + 1] = now()
                if used is not None:
                    memory.append(used() if program.busy[at >> 1] or not memory else memory[-1])
                at += 2
        self._tracker.wait(run.step)
        self._wiring.flush()
        for channels in self._wiring.stages.values():
            channels.stage.end()
        results = losses.shares(self._last.microbatches.values() if self._last else ())
        self._wiring.clear()
        if self._stopwatch is not None and self._idle is not None and marks:
            origin, moment = self._idle
            # The last one is behind the ends of the stages too: the device is idle then.
            _, *offsets, _ = self._stopwatch.offsets([origin, *marks, self._stopwatch.mark()])
            _set_device_times(program, times, moment, offsets)
            self._idle = self._stopwatch.mark(), now()
        every: Sequence[float] = times.tolist()
        ring.end()
        busy = program.busy
        spent = sum(compress(map(sub, every[1::2], every[::2]), busy), 0.0)
        recorded = MiniBatchTimes(
            run.step, run.first, program.number, began, tuple(every), tuple(memory)
        )
        return StepOutput(*results, spent, recorded)

    def _begin(self, run: RunStep, *, compares: bool) -> None:
        batch, wiring, program = run.batch, self._wiring, self._program
        own = block(batch.microbatches, self._replicas, wiring.replica)
        weights = sample_shares(batch.samples, batch.microbatches)[own.start : own.stop]
        for index, channels in wiring.stages.items():
            channels.stage.begin(run.step, run.first + own.start, run.loss_scale)
            channels.microbatches = program.microbatches(index, weights)
        current = self.feed.begin(run)
        if current is not None:
            self._set_data(current)
        wiring.begin(batch.signature, program.order)
        for reduction in wiring.reductions.values():
            reduction.begin(batch.signature, whole=run.complete, compares=compares)

    def _set_data(self, batch: MicroBatches) -> None:
        """Set the inputs of stage 0, and the targets there and on a last stage that is here.

        Inputs want no gradient, since they come from the data.
        """
        first, last = self._wiring.stages[0], self._last
        for m, value, target in zip(first.microbatches, batch.inputs, batch.targets, strict=True):
            mb = first.microbatches[m]
            mb.value, mb.target = value, target
            mb.wants_grad = [False] * len(distinct_tensors(value))
            if last is not None:
                last.microbatches[m].target = target

    def broadcast(self, value: Any) -> Any:
        """Return a value of the last stage on every worker.

        It passes from stage to stage over the channels of gradients, so that no other channel is
        needed.
        """
        self._tracker.wait(self._tracker.get().step)
        wiring = self._wiring
        for stage in sorted(wiring.stages, reverse=True):
            receiver = wiring.receivers.get(Edge(stage + 1, stage, Payload.GRADIENT))
            if receiver is not None:
                value = receiver.receive(0)
            sender = wiring.senders.get(Edge(stage, stage - 1, Payload.GRADIENT))
            if sender is not None:
                sender.send(0, value)
                sender.flush()  # the user may change it from now on
            if receiver is not None:
                receiver.release(0)
        return value
