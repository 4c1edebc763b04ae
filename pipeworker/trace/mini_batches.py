"""The mini-batches that the workers of a run have recorded, and what is read of them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise, takewhile

from pipeworker.plan.actions import Kind
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs
from pipeworker.trace.recorder import UPDATE
from pipeworker.trace.timeline import Command, WorkerLife


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One mini-batch of a step, as all workers of a generation have recorded it.

    Attributes:
        begin, end: when the first worker received its command, and the next one.
    """

    step: int
    lives: tuple[WorkerLife, ...]
    commands: tuple[Command, ...]
    begin: float
    end: float

    @property
    def suspended(self) -> float:
        """The seconds for which one of the workers was suspended."""
        return max(command.suspended for command in self.commands)


def mini_batches(lives: Iterable[WorkerLife]) -> Iterator[MiniBatch]:
    """Yield the mini-batches that all workers of a generation have recorded, in order."""
    by_generation: dict[int, list[WorkerLife]] = defaultdict(list)
    for life in lives:
        by_generation[life.generation].append(life)
    for _, members in sorted(by_generation.items()):
        if not _are_all(members):
            continue
        found = [
            {
                (command.step, command.first): (command, following)
                for command, following in pairwise([*_with_updates(life.commands), None])
                if command and command.actions and command.answered is not None
            }
            for life in members
        ]
        for key in sorted(set.intersection(*map(set, found))):
            pairs = [one[key] for one in found]
            commands = tuple(command for command, _ in pairs)
            following = [after.received for _, after in pairs if after is not None]
            done = max(command.answered or 0.0 for command in commands)
            end = max(min(following), done) if following else done
            begin = min(command.received for command in commands)
            if end > begin:  # else the file is damaged, and no share of the time is known
                yield MiniBatch(key[0], tuple(members), commands, begin, end)


def _with_updates(commands: Sequence[Command]) -> Iterator[Command]:
    """Yield commands; moves an update that another command begins with to its step.

    It is that of a user's own loop, an evaluation or a checkpoint, which begins behind the update.
    The command of a later step may have an update and no actions too: its actions are not recorded.
    """
    last: Command | None = None
    for command in commands:
        updates = tuple(takewhile(lambda span: span.name == UPDATE, command.spans))
        if last and updates and not command.actions and command.step <= last.step:
            rest = command.spans[len(updates) :]
            done = updates[-1].end if rest else command.answered
            last = replace(last, spans=(*last.spans, *updates), answered=done)
            if not rest:
                continue
            command = replace(command, received=updates[-1].end, spans=rest)
        if last:
            yield last
        last = command
    if last:
        yield last


def _are_all(members: Sequence[WorkerLife]) -> bool:
    """Return whether these are all workers of a generation, by their stages."""
    held: dict[int, list[int]] = defaultdict(list)
    for life in members:
        held[life.replica] += life.stages
    whole = [sorted(stages) == [*range(len(stages))] for stages in held.values()]
    return all(whole) and len({len(stages) for stages in held.values()}) == 1


def undisturbed(chosen: list[MiniBatch]) -> tuple[list[MiniBatch], float]:
    """Return those of steps without a suspended worker, and for how long workers of others were.

    The actions of the others tell nothing. If there are only such ones, all are returned, and 0.
    """
    disturbed = {one.step for one in chosen if one.suspended}
    found = [one for one in chosen if one.step not in disturbed]
    return (found, sum(one.suspended for one in chosen)) if found else (chosen, 0.0)


def warm(every: Iterable[MiniBatch]) -> list[MiniBatch]:
    """Return those of whole steps but the first of each generation, which makes memory; all if few.

    Those of workers that held other stages than the last ones, before a job shrank, are left out.
    """
    recorded = [*every]
    recorded = [one for one in recorded if _held(one) == _held(recorded[-1])]
    steps = [[*step] for _, step in groupby(recorded, lambda one: (_generation(one), one.step))]
    whole = [step for step in steps if not step[0].commands[0].first]
    if len(whole) > 1 and len(whole[-1]) < len(whole[-2]):
        whole.pop()  # the job may not have finished it
    first = {_generation(step[0]): step for step in reversed(whole)}
    warm = [step for step in whole if step is not first[_generation(step[0])]]
    return [*chain.from_iterable(warm)] or recorded


def _generation(one: MiniBatch) -> int:
    return one.lives[0].generation


def _held(one: MiniBatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return which worker of which replica holds which stages."""
    return [(life.rank, life.replica, life.stages) for life in one.lives]


def schedule_of(one: MiniBatch, replica: int = 0) -> Schedule:
    """Return the schedule that a replica's workers ran."""
    pairs = zip(one.lives, one.commands, strict=True)
    members = [(life, command) for life, command in pairs if life.replica == replica]
    workers = tuple(tuple(span.action for span in command.actions) for _, command in members)
    count = 1 + max((a.microbatch for actions in workers for a in actions), default=0)
    placement = Placement(tuple(life.stages for life, _ in members))
    return Schedule("recorded", count, placement, workers)


def costs_of(chosen: Iterable[MiniBatch], replica: int = 0) -> Costs:
    """Return the mean seconds of the actions of each stage of a replica."""
    sums: Counter[tuple[Kind, int]] = Counter()
    counts: Counter[tuple[Kind, int]] = Counter()
    stages = 0
    for one in chosen:
        for life, command in zip(one.lives, one.commands, strict=True):
            if life.replica != replica:
                continue
            stages = max(stages, 1 + max(life.stages))
            for action, begin, end in command.actions:
                if end is not None:
                    sums[action.kind, action.stage] += end - begin  # type: ignore[assignment]
                    counts[action.kind, action.stage] += 1

    def mean(kind: Kind, stage: int) -> float:
        return sums[kind, stage] / counts[kind, stage] if counts[kind, stage] else 0.0

    inputs = [mean(Kind.BACKWARD_INPUT, stage) for stage in range(stages)]
    whole = [
        mean(Kind.BACKWARD, stage) or inputs[stage] + mean(Kind.BACKWARD_WEIGHT, stage)
        for stage in range(stages)
    ]
    return Costs(
        tuple(mean(Kind.FORWARD, stage) for stage in range(stages)), tuple(whole), tuple(inputs)
    )


def recoveries(lives: Sequence[WorkerLife]) -> Iterator[tuple[tuple[int, int], float, float]]:
    """Yield the numbers of two generations, the end of the one and the begin of the other."""
    ends: dict[int, float] = {}
    begins: dict[int, float] = {}
    for life in lives:
        if life.commands:
            begin = min(life.began, life.commands[0].received)
            begins[life.generation] = min(begins.get(life.generation, begin), begin)
        for command in life.commands:
            known = [command.received, command.answered or 0.0]
            known += [span.end or span.begin for span in command.actions[-1:]]
            ends[life.generation] = max(ends.get(life.generation, 0.0), *known)
    for pair in pairwise(sorted(begins)):
        yield pair, ends[pair[0]], max(ends[pair[0]], begins[pair[1]])
