"""The timelines of simulated steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hypothesis import strategies as st

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.options import Options
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Kind, edge_of, format_actions
from pipeworker.plan.orders import Order
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Schedule, is_bounded
from pipeworker.plan.simulate import Costs, simulate, timeline
from pipeworker.record import run_record
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.rundir import RunDir
from pipeworker.trace.recorder import UPDATE, microseconds, row_of
from pipeworker.trace.ring import MiniBatchTimes
from pipeworker.trace.timeline import ActionSpan, Command, Span, WorkerLife

BASE = 5000.0


def start_of(rank: int, generation: int = 1, **more: Any) -> dict[str, Any]:
    own = {"worker": rank, "stages": f"{rank}", "replica": 0, "attempt": "a-0"}
    return {
        **own,
        "generation": generation,
        "host": "here",
        "clock": "one",
        "now": BASE,
        "time": 1e9,
        **more,
    }


def draw_schedule(
    data: st.DataObject, order: Order, workers: int, microbatches: int
) -> tuple[Schedule, Costs]:
    """Draw the recompute modes of an order's stages, and what each of them costs."""
    placement = order.place(workers)
    modes = [data.draw(st.sampled_from(["never", "always"])) for _ in range(placement.stages)]
    seconds = st.floats(0.001, 0.1)
    forward, first = (tuple(data.draw(seconds) for _ in range(placement.stages)) for _ in range(2))
    costs = Costs(forward, tuple(2 * each for each in first), first)
    return order.build(placement, microbatches, modes), costs


def lives_of(
    schedule: Schedule, costs: Costs | None = None, steps: int = 2, late: float | None = None
) -> list[WorkerLife]:
    """Return what the workers would record of a simulated schedule; receives take the waits.

    With `late`, a command without actions arrives so many seconds after the end of each step.
    """
    costs = costs or Costs.even(schedule.placement.stages, 0.010, 0.020)
    makespan = simulate(schedule, costs).makespan
    lives = []
    for rank, (actions, spans) in enumerate(
        zip(schedule.workers, timeline(schedule, costs), strict=True)
    ):
        computed = {str(span.action): span for span in spans}
        commands = []
        for step in range(1, steps + 1):
            base, now = BASE + 10 * step, 0.0
            found: list[ActionSpan] = []
            for place, action in enumerate(actions):
                begin = now
                if action.kind in RECEIVES:
                    following = [computed.get(str(later)) for later in actions[place:]]
                    now = next((span.start for span in following if span), now)
                elif span := computed.get(str(action)):
                    begin, now = span.start, span.end
                found.append(ActionSpan(action, base + begin, base + now))
            update = Span(UPDATE, base - 0.009, base - 0.005)
            commands.append(Command(step, 0, base - 0.01, base + now, (update,), tuple(found)))
            if late is not None:
                commands.append(Command(step, 1, base + makespan + late, None))
        held = schedule.placement.held[rank]
        lives.append(WorkerLife(rank, 0, held, "a-0", 1, "here", "one", BASE, 1e9, tuple(commands)))
    return lives


def recorded_lives(
    schedule: Schedule,
    costs: Costs,
    load: Sequence[float] = (0.0,),
    late: Sequence[float] = (0.0,),
    times: Sequence[float] = (1.0,),
) -> list[WorkerLife]:
    """Return what all workers would record of one step, with every wait where it occurs.

    Args:
        schedule: of each replica.
        costs: of its stages.
        load: the seconds that data() takes, by replica.
        late: by worker of a replica, how long after the first one it receives its command.
        times: by replica, how many times as long its actions take.
    """
    steps = [_Recorded(load, late, times, schedule, costs, *at) for at in _ranks(schedule, load)]
    begins: dict[tuple[int, Action], float] = {}
    while sum([step.advance(begins) for step in steps]):
        pass
    return [step.life(rank, begins) for rank, step in enumerate(steps)]


def _ranks(schedule: Schedule, load: Sequence[float]) -> list[tuple[int, int]]:
    return [(r, worker) for r in range(len(load)) for worker in range(len(schedule.workers))]


class _Recorded:
    """A worker in a step: what it has recorded so far."""

    def __init__(
        self,
        load: Sequence[float],
        late: Sequence[float],
        times: Sequence[float],
        schedule: Schedule,
        costs: Costs,
        replica: int,
        worker: int,
    ) -> None:
        self._load, self._schedule, self._costs = load, schedule, costs
        self._replica, self._worker = replica, worker
        self._times = times[replica % len(times)]
        self._received = self._now = BASE + late[worker % len(late)]
        self._spans: list[ActionSpan] = []
        self._sent: dict[Edge, list[Action]] = defaultdict(list)

    def advance(self, begins: dict[tuple[int, Action], float]) -> int:
        """Perform actions until one waits for what has not begun; return how many."""
        actions, done = self._schedule.workers[self._worker], len(self._spans)
        for action in actions[done:]:
            begins[self._replica, action] = self._now
            ends = [begins.get(key) for key in self._needs(action)]
            if None in ends:
                break
            begin, cost = self._now, self._times * self._costs.of(action.kind, action.stage)
            cost += self._load[self._replica] * (action.kind is Kind.LOAD)
            self._now = max([begin, *(end for end in ends if end is not None)]) + cost
            self._spans.append(ActionSpan(action, begin, self._now))
            if action.kind in SENDS:
                self._sent[edge_of(action)].append(action)
        return len(self._spans) - done

    def _needs(self, action: Action) -> list[tuple[int, Action]]:
        """Return the actions of others that must have begun, with their replicas."""
        kind, stage, others = action.kind, action.stage, range(len(self._load))
        if kind in (Kind.SUM, Kind.GATHER):
            before = Action(Kind.SCATTER if kind is Kind.SUM else Kind.SUM, stage, 0)
            return [(r, before) for r in others if r != self._replica]
        if kind in RECEIVES:
            return [(self._replica, _other_end(action))]
        if kind in SENDS and is_bounded(edge_of(action), self._schedule.placement):
            sent = self._sent[edge_of(action)]
            if len(sent) >= CHANNEL_CAPACITY:
                return [(self._replica, _other_end(sent[-CHANNEL_CAPACITY]))]
        return []

    def life(self, rank: int, begins: dict[tuple[int, Action], float]) -> WorkerLife:
        held = self._schedule.placement.held[self._worker]
        sends = [action for sent in self._sent.values() for action in sent]
        taken = [begins[self._replica, _other_end(action)] for action in sends]
        answered = max([self._now, *taken])  # it may change nothing that is under way
        command = Command(1, 0, self._received, answered, (), tuple(self._spans))
        replica, commands = self._replica, (command,)
        return WorkerLife(rank, replica, held, "a-0", 1, "here", "one", BASE, 1e9, commands)


def _other_end(action: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    edge, name = edge_of(action), action.kind.value
    opposite = Kind(name.replace(">", "<") if action.kind in SENDS else name.replace("<", ">"))
    stage = edge.target if action.kind in SENDS else edge.source
    return Action(opposite, stage, action.microbatch, action.stage if action.peer >= 0 else -1)


def write_lives(run_dir: RunDir, schedule: Schedule, lives: Sequence[WorkerLife]) -> None:
    """Write the rows that workers have of such lives; each action takes 2 MiB more."""
    run_dir.timeline.mkdir(exist_ok=True)
    for life, actions in zip(lives, schedule.workers, strict=True):
        rows = Rows(run_dir.worker_timeline(life.rank))
        rows.add(start_of(life.rank, life.generation, host=life.host, clock=life.clock))
        rows.add({"program": 1, "actions": format_actions(actions)})
        for command in life.commands:
            times = tuple(at for span in command.actions for at in (span.begin, span.end or 0.0))
            memory = tuple((100 + 2 * place) << 20 for place in range(len(actions)))
            base = round(command.received, 6)
            spans = [[s.name, *microseconds(base, (s.begin, s.end))] for s in command.spans]
            step, first = command.step, command.first
            row = {"step": step, "first": first, "received": base, "spans": spans}
            if times:
                row |= row_of(MiniBatchTimes(step, first, 1, times[0], times, memory))
            rows.add({**row, "answered": command.answered})
        for sample in life.samples:
            rows.add(sample._asdict())
        rows.close()


def write_records(
    run_dir: RunDir, facts: NetworkFacts | None = None, stages: int = 2, **options: Any
) -> None:
    """Write what a run of as many layers as stages records besides its timeline."""
    given = asdict(Options("job.py", stages, 4, recompute="never", **options))
    run_record.write(run_dir, given, {"host": "here", "pid": 1, "started": "2026-11-26"})
    plan = {"stages": [{"stage": s, "layers": [s, s + 1]} for s in range(stages)]}
    found = {} if facts is None else {"facts": asdict(facts)}
    run_dir.plan.write_text(json.dumps({**plan, **found}))
