"""The job: what lasts while generations of workers come and go. Pure: events in, effects out.

Time is an argument; nothing here reads a clock, a file or a socket. The same events give the same
effects.
"""

from __future__ import annotations

from pipeworker.coordinator.effects import Dropped, Effect, Ended, Status
from pipeworker.coordinator.events import (
    Arrived,
    Broken,
    Committed,
    Event,
    Garbled,
    SaveAsked,
    StarterGone,
    Ticked,
    Unreachable,
)
from pipeworker.coordinator.generation import Generation
from pipeworker.coordinator.loop import loop_for
from pipeworker.coordinator.progress import Progress
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import End, Lost, Verdict
from pipeworker.job.options import Options
from pipeworker.plan import orders
from pipeworker.timings import DEFAULT, Timings
from pipeworker.wire.lines import Interrupt, Unwell, WorkerExited, never
from pipeworker.wire.messages import Cause, Failure


class Job:
    """One job, from the first Hello to the verdict.

    Args:
        started: when; the first generation begins at once.
        generation: the number of the first one.
    """

    def __init__(
        self,
        options: Options,
        run_dir: str,
        started: float,
        *,
        timings: Timings = DEFAULT,
        generation: int = 1,
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._timings = timings
        self.placement = orders.placement(options.schedule, options.stages)
        self.progress = Progress(scaler=Scaler() if options.precision == "fp16" else None)
        self.generation = self._begin(generation, started)
        self.over = False

    @property
    def peers(self) -> list[bytes]:
        """The identities of all workers that joined."""
        return self.generation.roster.peers

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take part in what happened; returns what is to be done, in order."""
        if self.over:
            return []
        effects = self._pass_on(event, now)
        end = self.generation.end
        if end is None:
            return effects
        self.over = True
        return [*effects, self._ended(end)]

    def _ended(self, end: End) -> Ended:
        """The verdict on the job. What is lost is not started again yet: it has failed."""
        verdict = Verdict(Status.FAILED, 1, end.failure) if isinstance(end, Lost) else end
        return Ended(
            verdict.status,
            verdict.exit_status,
            self.progress.steps,
            self.generation.roster.peak_memory(),
            self.progress.bubble,
            verdict.failure,
            self.progress.attempts - 1,
        )

    def _begin(self, number: int, now: float) -> Generation:
        self.progress.attempts += 1
        return Generation(
            number,
            self._options,
            self._run_dir,
            self.placement,
            self._timings,
            loop_for(self._options, self.placement, self.progress),
            self.progress,
            now,
        )

    def _pass_on(self, event: Event, now: float) -> list[Effect]:
        generation = self.generation
        match event:
            case Arrived():
                if event.generation != generation.number:
                    name = type(event.message).__name__
                    return [Dropped(f"{name} of generation {event.generation}")]
                return generation.arrived(event.peer, event.message, now)
            case Garbled():
                return generation.lied(event.peer, event.text) or [Dropped(event.text)]
            case WorkerExited():
                if event.generation != generation.number:
                    return [Dropped(f"an exit of generation {event.generation}")]
                return generation.exited(event, now)
            case Unreachable():
                generation.roster.unreachable(event.peer, now)
                return []
            case Ticked():
                return generation.ticked(now)
            case Interrupt():
                return generation.interrupt(now)
            case SaveAsked():
                return generation.save_asked()
            case Committed():
                return generation.committed(event.step, now)
            case StarterGone():
                member = generation.roster.members.get(event.starter)
                if member is not None:
                    return generation.fail(member.gone())
                gone = "the process that started the job is gone"
                return generation.fail(Failure(Cause.LOST, gone))
            case Unwell():
                return generation.fail(Failure(Cause.LOST, event.text))
            case Broken():
                return generation.fail(Failure(Cause.INTERNAL, event.text))
        return never(event)
