"""The timelines of simulated steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeworker.plan.actions import RECEIVES, format_actions
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, simulate, timeline
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


def write_lives(run_dir: RunDir, schedule: Schedule, lives: Sequence[WorkerLife]) -> None:
    """Write the rows that workers have of such lives; each action takes 2 MiB more."""
    run_dir.timeline.mkdir(exist_ok=True)
    for life, actions in zip(lives, schedule.workers, strict=True):
        rows = Rows(run_dir.worker_timeline(life.rank))
        rows.add(start_of(life.rank, life.generation))
        rows.add({"program": 1, "actions": format_actions(actions)})
        for command in life.commands:
            times = tuple(at for span in command.actions for at in (span.begin, span.end or 0.0))
            memory = tuple((100 + 2 * place) << 20 for place in range(len(actions)))
            base = round(command.received, 6)
            spans = [[s.name, *microseconds(base, (s.begin, s.end))] for s in command.spans]
            actions_row = row_of(MiniBatchTimes(command.step, 0, 1, times[0], times, memory))
            row = {"step": command.step, "received": base, "spans": spans, **actions_row}
            rows.add({**row, "answered": command.answered})
        rows.close()
