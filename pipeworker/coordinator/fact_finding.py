"""The part of a generation that finds the facts of layers, before its plan is drawn. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.effects import Dropped, Effect, KeepFacts, Log, MakePlan, WritePlan
from pipeworker.coordinator.ending import JobEnd, Status
from pipeworker.coordinator.events import PlanMade
from pipeworker.coordinator.lifecycle import Lifecycle
from pipeworker.coordinator.measuring import Measuring
from pipeworker.coordinator.roster import Member
from pipeworker.coordinator.waiting import State
from pipeworker.errors import ProtocolError, UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.plan.planned import Planned
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.profile import Measured


@dataclass(slots=True)
class FactFinding(Lifecycle):
    """A generation that asks its workers for facts; the job keeps them in its progress.

    Attributes:
        lacks: facts that could not be measured, for the user. They are shown after a mini-batch:
            a layer that raises there too gives only its error.
    """

    lacks: list[Warned] = field(init=False, default_factory=list)
    _measuring: Measuring | None = field(init=False, default=None)
    _measured_since: float = field(init=False, default=0.0)

    def find_facts(self, now: float) -> list[Effect]:
        """Ask workers for the facts that are missing, or build if there are none."""
        described = [member.described for member in self.members if member.described]
        if self._measuring is None and not self._begin_measuring(described, now):
            return self._make_plan()
        measuring = self._measuring
        assert measuring
        if requests := measuring.requests():
            self.await_all(State.MEASURING)
            self.awaited = set(requests)
            members = self.roster.members
            return [self.send(members[rank].peer, one) for rank, one in sorted(requests.items())]
        self.progress.facts, self.progress.seeks_facts = measuring.facts(), False
        summary = measuring.summary(now - self._measured_since)
        effects: list[Effect] = [Log(summary)]
        if warning := measuring.warning:
            self.lacks = [Warned(warning)]
        elif self.progress.facts is None:
            self.lacks = [Warned(summary, note=True)]
        if warning and self.options.plan_only:  # runs no mini-batch
            effects += self.lacks
        if measuring.fresh:
            effects.append(KeepFacts(measuring.fresh))
        return [*effects, *self._make_plan()]

    def _begin_measuring(self, described: list[Described], now: float) -> bool:
        """Return whether facts are wanted, and neither recorded nor impossible to find."""
        progress = self.progress
        if progress.facts and len(progress.facts.layers) != len(described[0].layers):
            progress.facts, progress.seeks_facts = None, True  # of a model that has changed
            progress.plans.clear()
        machines = [one.machine for one in described if one.machine]
        if not progress.seeks_facts or len(machines) < len(described):
            return False  # without machines the input of the network is not known yet
        first = described[self.placement.rank_of(0)]
        outline = first.outline
        self._measuring = Measuring(
            self.placement,
            machines,
            [member.hello.host for member in self.members],
            outline,
            dict(progress.known_facts),
            self.options.no_profile,
            self.snapshots.slots,
            tuple(sorted(set.intersection(*({*one.frozen} for one in described)))),
            first.shared_buffers,
            problem=first.problem,
        )
        self._measured_since = now
        return True

    def _make_plan(self) -> list[Effect]:
        """Have the plan made, if there are facts and it was not made before; else build."""
        facts, options = self.progress.facts, self.options
        if options.plan_only:
            return self._end_with_facts()
        if facts is None or not options.is_planned or self.plan:
            return self.build()
        self.state, self.awaited = State.PLANNING, set()
        return [MakePlan(self.number, facts, options)]

    @property
    def plan(self) -> Planned | None:
        """The plan of the job with its workers; None if it is not planned from facts."""
        return self.progress.plans.get(self.options.stages)

    def _end_with_facts(self) -> list[Effect]:
        """End a job that only finds the facts of the layers: record them in its plan."""
        facts = self.progress.facts
        if facts is None:
            problem = self._measuring.problem if self._measuring else "none were asked for"
            text = f"model(): its layers cannot be measured: {problem}; launch needs no plan"
            return self.fail(Failure(Cause.USAGE, text))
        content = {"facts": asdict(facts)}
        return [WritePlan(content), *self.over(JobEnd(Status.DONE, 0))]

    def plan_made(self, event: PlanMade) -> list[Effect]:
        """Build the stages of a plan."""
        if event.generation != self.number or self.state is not State.PLANNING:
            return [Dropped(f"a plan of generation {event.generation} while {self.waiting}")]
        if event.planned is None:
            return self.fail(Failure(Cause.USAGE, event.error))
        self.progress.plans[self.options.stages] = event.planned
        try:
            return self.build()
        except UsageError as error:  # the options do not fit the model
            return self.fail(Failure(Cause.USAGE, str(error)))

    def build(self) -> list[Effect]:
        """Draw the plan, and have the workers build their stages."""
        members = self.members
        described = [m.described for m in members if m.described]
        planned = self.plan
        self.blueprint = Blueprint.draw(self.options, described, planned)
        self.blueprint.check_resumed(self.layers, self.progress.steps)
        self.roster.arrange(self.blueprint.placement)
        self.loop.placement = self.placement
        self.await_all(State.BUILDING)
        notes = described[self.placement.rank_of(0)].notes if self.is_first else ()
        lacking = [planned.lacking] if planned and planned.lacking else []
        return [
            *(Warned(text, note=True) for text in notes),
            *(Warned(f"the job may run out of memory: {text}") for text in lacking),
            *map(Log, self.blueprint.summary()),
            *(self.send(m.peer, self.blueprint.plan(m.hello.rank)) for m in members),
        ]

    def on_measured(self, member: Member, message: Measured, now: float) -> list[Effect]:
        """Add the facts that a worker has measured; continue when all have answered.

        Raises:
            ProtocolError: they are an outline that this worker cannot have drawn.
        """
        assert self._measuring
        if message.rank not in self.awaited:
            raise ProtocolError("facts that it was not asked for")
        if message.outline is not None:
            layers = len(member.described.layers) if member.described else 0
            first = message.rank == self.placement.rank_of(0)
            if not first or len(message.outline.of_layer) != layers:
                raise ProtocolError(f"an outline of {len(message.outline.of_layer)} layers")
        self._measuring.add(message)
        if not self.is_last(message.rank):
            return []
        self._measuring.close_round()
        return self.find_facts(now)
