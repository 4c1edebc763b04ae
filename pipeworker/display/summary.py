"""The final summary of a job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.display.text import mebibytes, number
from pipeworker.wire.lines import Verdict

_EXCESS = 0.1
"""How far the measured bubble may exceed the schedule's: no two stages take equally long."""
_IMBALANCE = 1.5
_SHORT_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class BubbleContext:
    """The facts by which the bubble of a job is explained.

    Attributes:
        bubble: the schedule's, 0..1.
        workers: processes of all replicas.
        cores: processor cores that the workers share; 0 if they share none, or if it is unknown.
        microbatches: of one replica.
        seconds: of a step.
    """

    bubble: float
    workers: int = 1
    threads: int = 1
    cores: int = 0
    microbatches: int = 1
    seconds: float = 0.0


def explain_bubble(measured: float, busy: Sequence[float], context: BubbleContext) -> str:
    """Return why the `measured` bubble is much larger than the schedule's; "" if that is unknown.

    `busy` is the share of the time in which each worker of a replica computed.
    """
    if measured <= context.bubble + _EXCESS:
        return ""
    if len(busy) > 1 and (others := (sum(busy) - max(busy)) / (len(busy) - 1)):
        times = max(busy) / others
        if times > _IMBALANCE:
            slow = busy.index(max(busy))
            advice = "--balance" if slow else "--balance, or a faster data(), which it reads"
            return f"worker {slow} computes {times:.1f} times as long as the others ({advice})"
    workers, threads, cores = context.workers, context.threads, context.cores
    if cores and workers * threads > cores:
        each = f" with {threads} threads each" if threads > 1 else ""
        return f"{workers} workers{each} share {cores} core{'s' if cores > 1 else ''}"
    seconds = sum(busy) / max(1, len(busy)) * context.seconds / context.microbatches
    if 0 < seconds < _SHORT_SECONDS:
        return (
            f"a worker computes {seconds * 1e3:.1g} ms for a micro-batch, little compared with the "
            "overhead of each (larger mini-batches, or fewer --microbatches)"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts about a job that has ended; None or empty is unknown.

    Attributes:
        loss: of the last step.
        best: the step and the loss of the best evaluation.
        checkpoint: the step and the path of the newest checkpoint.
        export: the command that exports its weights.
        resume: the command that resumes the run.
        resumed_at: the steps that were done when the run was resumed.
    """

    verdict: Verdict
    path: str
    context: BubbleContext | None = None
    loss: float | None = None
    best: tuple[int, float] | None = None
    checkpoint: tuple[int, str] | None = None
    export: str = ""
    resume: str = ""
    resumed_at: int = 0

    def lines(self) -> list[str]:
        """Return the lines of the summary, without the error."""
        verdict = self.verdict
        if not verdict.steps or (verdict.is_usage_error and verdict.steps == self.resumed_at):
            return []
        now = f", {verdict.steps - self.resumed_at} of them now," if self.resumed_at else ""
        steps = f"{verdict.steps} step{'s' * (verdict.steps != 1)}{now}"
        return [
            f"{verdict.status}: {steps} in {verdict.seconds:.1f} s",
            *self._loss(),
            *self._bubble(),
            *self._memory(),
            *self._continuation(),
            f"run directory: {self.path}",
        ]

    def _loss(self) -> list[str]:
        found = [] if self.loss is None else [f"loss: {number(self.loss)}"]
        if self.best:
            step, loss = self.best
            found.append(f"best evaluation: {number(loss)}, after step {step}")
        return [", ".join(found)] if found else []

    def _bubble(self) -> list[str]:
        context, verdict = self.context, self.verdict
        if context is None or not verdict.busy:
            return []
        bubble = verdict.bubble
        found = [f"bubble: {bubble:.1%} measured, {context.bubble:.1%} by the schedule"]
        if reason := explain_bubble(bubble, verdict.busy, context):
            found.append(f"  larger than the schedule's: {reason}")
        return found

    def _memory(self) -> list[str]:
        peaks = self.verdict.peak_memory
        return [f"peak memory by worker: {mebibytes(peaks)}"] if any(peaks) else []

    def _continuation(self) -> list[str]:
        verdict = self.verdict
        if self.checkpoint is None:
            return ["weights: none, because no checkpoint was complete yet (--checkpoint-every)"]
        step, path = self.checkpoint
        after = f", after step {step}" if step != verdict.steps else ""
        resume = "train further" if verdict.status == "done" else "resume"
        return [f"weights: {path}{after}", f"export: {self.export}", f"{resume}: {self.resume}"]
