"""A slow, independent checker of schedules: one action after the other, by the rules themselves."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, edge_of
from pipeworker.plan.check import LiveMicroBatches
from pipeworker.plan.schedule import Schedule, is_bounded

KEPT = ("activations", "inputs", "deferred")


class Illegal(Exception):
    """The reason for which a schedule is rejected."""


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise Illegal(why)


@dataclass
class _WorkerCheck:
    """Checks the actions of one worker, one after the other."""

    schedule: Schedule
    worker: int

    def __post_init__(self) -> None:
        self.place = self.schedule.placement
        self.last = self.place.stages - 1
        self.actions = self.schedule.workers[self.worker]
        self.done: list[Action] = []
        self.away: dict[int, set[int]] = {s: set() for s in range(self.place.stages)}
        self.most = {(what, s): 0 for what in KEPT for s in range(self.place.stages)}

    def here(self, stage: int) -> bool:
        return stage in self.place.held[self.worker]

    def possible(self) -> set[Action]:
        """Return all actions that the tuple may contain."""
        found = set()
        s = self.schedule
        for stage in self.place.held[self.worker]:
            for m in range(s.microbatches):
                kinds = ["F"] if s.forward_only else ["F", "R", "FETCH", "B", "I", "W"]
                found |= {Action(Kind(kind), stage, m) for kind in kinds}
                found |= self.sent_and_received(stage, m)
            if stage == 0 and not s.forward_only:
                found.add(Action(Kind.LOAD, 0, 0))
            for a, peer in s.ties:
                if a == stage:
                    found.add(Action(Kind.REDUCE_TIED, stage, 0))
                    if not self.here(peer):
                        found.add(Action(Kind.SEND_TIED, stage, 0, peer))
                        found.add(Action(Kind.RECEIVE_TIED, stage, 0, peer))
        return found

    def sent_and_received(self, stage: int, m: int) -> set[Action]:
        s, last = self.schedule, self.last
        found = []
        if stage > 0 and not self.here(stage - 1):
            found += [("<A", -1), (">G", -1)]
        if stage < last and not self.here(stage + 1):
            found += [(">A", -1), ("<G", -1)]
        if stage == 0 and not self.here(last):
            found.append((">T", last))
        if stage == last and not self.here(0):
            found.append(("<T", 0))
        for a, b in s.skips:
            if a == stage and not self.here(b):
                found += [(">S", b), ("<H", b)]
            if b == stage and not self.here(a):
                found += [("<S", a), (">H", a)]
        gradients = "GH" if s.forward_only else ""
        return {Action(Kind(k), stage, m, p) for k, p in found if k[1] not in gradients}

    def run(self) -> None:
        possible = self.possible()
        for action in self.actions:
            _require(action in possible, f"{action} is not of worker {self.worker}")
            _require(action not in self.done, f"{action} is done")
            self.needs(action)
            self.done.append(action)
            self.keep(action)
        for action in possible:
            if action.kind in "BIW":
                _, stage, m, _ = action
                split = self.did("I", stage, m)
                _require(split == self.did("W", stage, m), f"{action}: half a backward")
                _require(self.did("B", stage, m) is not split, f"{action}: not once")
            elif action.kind not in (Kind.RECOMPUTE, Kind.FETCH):
                _require(action in self.done, f"{action} is missing")

    def did(self, kind: str, stage: int, m: int, peer: int = -1) -> bool:
        return Action(Kind(kind), stage, m, peer) in self.done

    def has_input_gradient(self, stage: int, m: int) -> bool:
        return self.did("B", stage, m) or self.did("I", stage, m)

    def has_left(self, stage: int, m: int) -> bool:
        """Whether an action that computes for the stage has run since the forward of `m`."""
        computed = [a for a in self.done if a.stage == stage and a.kind in COMPUTE]
        return self.did("F", stage, m) and computed[-1] != Action(Kind.FORWARD, stage, m)

    def accumulated(self, stage: int) -> int:
        return sum(a.stage == stage and a.kind in ("B", "W") for a in self.done)

    def forwarded(self, stage: int) -> int:
        return sum(a.stage == stage and a.kind is Kind.FORWARD for a in self.done)

    def needs(self, action: Action) -> None:
        kind, stage, m, _ = action
        skips, ties = self.schedule.skips, self.schedule.ties
        needed: list[tuple[str, bool]] = []
        match kind.value:
            case "F":
                needed.append(("its turn", self.forwarded(stage) == m))
                if stage > 0 and self.here(stage - 1):
                    needed.append(("input", self.did("F", stage - 1, m)))
                elif stage > 0:
                    needed.append(("input", self.did("<A", stage, m)))
                if stage == self.last:
                    there = self.did("F", 0, m) if stage else True
                    needed.append(
                        ("target", there if self.here(0) else self.did("<T", stage, m, 0))
                    )
                for a, b in skips:
                    if b == stage:
                        arrived = self.did("<S", stage, m, a)
                        needed.append(("skip", self.did("F", a, m) if self.here(a) else arrived))
            case "R" | ">A" | ">T" | ">S":
                needed.append(("forward", self.did("F", stage, m)))
            case "B" | "I":
                needed.append(("forward", self.did("F", stage, m)))
                if Action(Kind.RECOMPUTE, stage, m) in self.actions:
                    needed.append(("recompute", self.did("R", stage, m)))
                if Action(Kind.FETCH, stage, m) in self.actions:
                    needed.append(("fetch", self.did("FETCH", stage, m)))
                if stage < self.last:
                    arrived = self.did("<G", stage, m)
                    local = self.has_input_gradient(stage + 1, m)
                    needed.append(("gradient", local if self.here(stage + 1) else arrived))
                for a, b in skips:
                    if a == stage:
                        arrived = self.did("<H", stage, m, b)
                        local = self.has_input_gradient(b, m)
                        needed.append(("skip gradient", local if self.here(b) else arrived))
            case "FETCH":
                needed.append(("the end of the copy to the host", self.has_left(stage, m)))
                again = Action(Kind.RECOMPUTE, stage, m) in self.actions
                needed.append(("a forward that keeps its graph", not again))
            case ">G" | ">H":
                needed.append(("backward", self.has_input_gradient(stage, m)))
            case ">TIE":
                needed.append(("all backwards", self.accumulated(stage) == self.count))
            case "TIE":
                needed.append(("all backwards", self.accumulated(stage) == self.count))
                for a, b in ties:
                    if a == stage and self.here(b):
                        needed.append(("all its backwards", self.accumulated(b) == self.count))
                    elif a == stage:
                        needed.append(("a tied gradient", self.did("<TIE", stage, 0, b)))
        if kind.value == "W":
            needed.append(("the input gradient", self.did("I", stage, m)))
        if kind.value in ("B", "W"):
            needed.append(("its turn", self.accumulated(stage) == m))
        for what, holds in needed:
            _require(holds, f"{action} comes before {what}")

    @property
    def count(self) -> int:
        return self.schedule.microbatches

    def keep(self, action: Action) -> None:
        """Count live micro-batches now; an action that releases one still counts it."""
        stage = action.stage
        if action.kind is Kind.FETCH:
            self.away[stage].discard(action.microbatch)
        counts: Counter[str] = Counter()
        for m in range(self.count):
            over = {Action(kind, stage, m) for kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
            if over.intersection(self.done) and action not in over:
                continue
            recompute = Action(Kind.RECOMPUTE, stage, m) in self.actions
            away = m in self.away[stage]
            counts["inputs"] += self.did("F", stage, m)
            counts["activations"] += self.did("R" if recompute else "F", stage, m) and not away
            counts["deferred"] += self.did("I", stage, m)
        for what in KEPT:
            self.most[what, stage] = max(self.most[what, stage], counts[what])
        for m in range(self.count):
            fetch = Action(Kind.FETCH, stage, m)
            if fetch in self.actions and fetch not in self.done and self.has_left(stage, m):
                self.away[stage].add(m)


def check_slowly(schedule: Schedule, capacity: int) -> LiveMicroBatches:
    """Check a schedule as `check` does, but one action at a time; raise Illegal."""
    stages = schedule.placement.stages
    for a, b in schedule.skips:
        _require(0 <= a < b < stages, "a skip leads back")
    for a, b in schedule.ties:
        _require((b, a) in schedule.ties and 0 <= a < stages, "a tie has one direction")
    workers = [_WorkerCheck(schedule, worker) for worker in range(len(schedule.workers))]
    for worker in workers:
        worker.run()
    _play(schedule, capacity)
    owners = schedule.placement.owners
    activations, inputs, deferred = (
        tuple(workers[owners[s]].most[what, s] for s in range(stages)) for what in KEPT
    )
    return LiveMicroBatches(activations, inputs, deferred)


def _play(schedule: Schedule, capacity: int) -> None:
    """Let workers take turns until none can continue; frames are numbered by micro-batch."""
    frames: dict[object, deque[int]] = {}
    at = [0] * len(schedule.workers)
    progressed = True
    while progressed:
        progressed = False
        for worker, actions in enumerate(schedule.workers):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                if action.kind in SENDS or action.kind in RECEIVES:
                    edge = edge_of(action)
                    queue = frames.setdefault(edge, deque())
                    if action.kind in SENDS:
                        if len(queue) >= capacity and is_bounded(edge, schedule.placement):
                            break
                        queue.append(action.microbatch)
                    elif not queue:
                        break
                    else:
                        _require(
                            queue.popleft() == action.microbatch,
                            f"{action} is not next",
                        )
                at[worker] += 1
                progressed = True
    _require(all(a == len(acts) for a, acts in zip(at, schedule.workers, strict=True)), "deadlock")
    _require(not any(frames.values()), "something is never received")
