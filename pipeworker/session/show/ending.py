"""How the end of a job reads: what it came to, and how its user gets on from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.session.show.figures import number
from pipeworker.wire.lines import Verdict

_MUCH = 0.1
"""What a measured bubble may have above the schedule's: no two stages take equally long."""
_SLOW = 1.5
_SHORT = 1e-3


@dataclass(frozen=True, slots=True)
class Measured:
    """What the bubble of a job is judged by.

    Attributes:
        bubble: the schedule's, 0..1.
        workers: of all replicas; `threads`, of each.
        cores: that they share; 0 where they do not, or nobody knows.
        microbatches: of a replica.
        seconds: of a step.
    """

    bubble: float
    workers: int = 1
    threads: int = 1
    cores: int = 0
    microbatches: int = 1
    seconds: float = 0.0


def excess(measured: float, busy: Sequence[float], against: Measured) -> str:
    """Why a bubble is much larger than the schedule's; empty where it is not, or nobody knows.

    Args:
        busy: the share of the time that each worker of a replica computed.
    """
    if measured <= against.bubble + _MUCH:
        return ""
    if len(busy) > 1 and (others := (sum(busy) - max(busy)) / (len(busy) - 1)):
        times = max(busy) / others
        if times > _SLOW:
            slow = busy.index(max(busy))
            how = "--balance" if slow else "--balance, or a quicker data(), which it reads"
            return f"stage {slow} is busy {times:.1f} times as long as the others ({how})"
    workers, threads, cores = against.workers, against.threads, against.cores
    if cores and workers * threads > cores:
        each = f" with {threads} threads each" if threads > 1 else ""
        return f"{workers} workers{each} share {cores} core{'s' if cores > 1 else ''}"
    each_takes = sum(busy) / max(1, len(busy)) * against.seconds / against.microbatches
    if 0 < each_takes < _SHORT:
        return (
            f"a stage computes {each_takes * 1e3:.1g} ms for a micro-batch, little beside what "
            "each costs of itself (larger mini-batches, or fewer --microbatches)"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of a job that has ended; None or empty is what nobody knows.

    Attributes:
        path: its run directory.
        before: steps that were done when it was gone on with.
        measured: as it was planned and ran.
        loss: of the last step.
        best: the step and the loss of its best evaluation.
        checkpoint: the step of the newest one, and where it is.
        export, resume: commands that make something of that.
    """

    verdict: Verdict
    path: str
    measured: Measured | None = None
    replicas: int = 1
    loss: float | None = None
    best: tuple[int, float] | None = None
    checkpoint: tuple[int, str] | None = None
    export: str = ""
    resume: str = ""
    before: int = 0

    def lines(self) -> list[str]:
        """What is said of it, but for its error."""
        verdict = self.verdict
        if not verdict.steps:
            return []
        here = f", {verdict.steps - self.before} of them now," if self.before else ""
        steps = f"{verdict.steps} step{'s' * (verdict.steps != 1)}{here}"
        return [
            f"{verdict.status}: {steps} in {verdict.seconds:.1f} s",
            *self._loss(),
            *self._bubble(),
            *self._memory(),
            *self._further(),
            f"run directory: {self.path}",
        ]

    def _loss(self) -> list[str]:
        found = [] if self.loss is None else [f"loss: {number(self.loss)}"]
        if self.best:
            step, loss = self.best
            found.append(f"best evaluation: {number(loss)}, after step {step}")
        return [", ".join(found)] if found else []

    def _bubble(self) -> list[str]:
        measured, verdict = self.measured, self.verdict
        if measured is None or not verdict.busy:
            return []
        bubble = verdict.bubble
        found = [f"bubble: {bubble:.1%} measured, {measured.bubble:.1%} by the schedule"]
        if why := excess(bubble, verdict.busy, measured):
            found.append(f"  larger than the schedule's: {why}")
        return found

    def _memory(self) -> list[str]:
        peaks = self.verdict.peak_memory
        if not any(peaks):
            return []
        what = "worker" if self.replicas > 1 else "stage"
        shown = ", ".join(f"{peak / 2**20:.0f}" if peak else "?" for peak in peaks)
        return [f"peak memory by {what}: {shown} MiB"]

    def _further(self) -> list[str]:
        verdict = self.verdict
        if self.checkpoint is None:
            return ["weights: none, as no checkpoint was complete yet (--checkpoint-every)"]
        step, path = self.checkpoint
        after = f", after step {step}" if step != verdict.steps else ""
        further = "train further" if verdict.status == "done" else "go on"
        return [
            f"weights: {path}{after}",
            f"export: {self.export}",
            f"{further}: {self.resume}",
        ]
