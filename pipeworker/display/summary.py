"""The final summary of a job. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeworker.display.figures import after
from pipeworker.display.text import megabytes, number
from pipeworker.facts.speed import Speed
from pipeworker.plan.figures import plural
from pipeworker.wire.lines import Verdict

_EXCESS = 0.1
"""How far the measured bubble may exceed the schedule's: no two stages take equally long."""
_IMBALANCE = 1.5
_SHORT_SECONDS = 1e-3
_WRONG = 0.15
"""The relative difference from which a prediction counts as wrong."""
_SHORT_STEP = 5e-3
"""Seconds of a step that may go to sends and commands, which no plan counts."""


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The facts by which the bubble of a job, and a wrong prediction, are explained.

    Attributes:
        bubble: the schedule's, 0..1.
        workers: processes of all replicas.
        cores: processor cores that the workers share; 0 if they share none, or if it is unknown.
        microbatches: of one replica in a step, those of all its mini-batches.
        seconds: of a step.
        predicted: the predicted duration of a step; 0 if unknown.
        computing: by worker of a replica, the part of it in which it was to compute.
    """

    bubble: float
    workers: int = 1
    threads: int = 1
    cores: int = 0
    microbatches: int = 1
    seconds: float = 0.0
    predicted: float = 0.0
    computing: tuple[float, ...] = ()

    @property
    def shared_cores(self) -> str:
        """The cores that the workers share, if they are fewer than their threads; else ""."""
        workers, threads, cores = self.workers, self.threads, self.cores
        if not cores or workers * threads <= cores:
            return ""
        each = f" with {threads} threads each" if threads > 1 else ""
        return f"{workers} workers{each} share {cores} core{'s' if cores > 1 else ''}"


def explain_prediction(speed: Speed, steps: int, busy: Sequence[float], plan: PlanContext) -> str:
    """Return how far the predicted duration of a step was wrong, and why; "" if it was not.

    `busy` is the share of the time in which each worker of a replica computed, in all `steps`.
    """
    measured, predicted = speed.median_step, plan.predicted
    if not predicted or not steps or abs(measured - predicted) <= _SHORT_STEP:
        return ""
    if abs(measured / predicted - 1) <= _WRONG:
        return ""
    longer, each = measured > predicted, max(plan.computing, default=0.0) / plan.microbatches
    if longer and each < _SHORT_SECONDS:
        return ""  # the overhead of a micro-batch takes longer than its layers
    text = (
        f"{number(predicted)} s a step; it took {abs(measured / predicted - 1):.0%} "
        f"{'longer' if longer else 'less'}: "
    )
    if longer and plan.shared_cores:
        return text + plan.shared_cores
    data = speed.data / steps
    if longer and data > (measured - predicted) / 2:
        return f"{text}data() took {number(data)} s a step, which no plan knows"
    pairs = zip(busy, plan.computing, strict=False)
    changed = [(share * measured, expected) for share, expected in pairs]
    sign, least = 1 if longer else -1, _WRONG / 2 * predicted
    most = max(changed, key=lambda pair: sign * (pair[0] - pair[1]), default=(0.0, 0.0))
    explained = sign * (most[0] - most[1])
    if explained > max(least, abs(measured - predicted) / 2):
        worker = changed.index(most)
        return (
            f"{text}worker {worker} computed {number(most[0])} s a step, and {number(most[1])} s "
            "by the measured times of its layers"
        )
    if all(abs(took - expected) <= least for took, expected in changed):
        return (
            f"{text}the workers computed as long as predicted, and waited for the rest of the time"
        )
    if explained > least:  # but this is the smaller part
        return f"{text}the workers waited {'more' if longer else 'less'} than predicted"
    computed, waited = ("less", "more") if longer else ("more", "less")
    return f"{text}the workers computed {computed} than predicted, and waited {waited}"


def explain_bubble(measured: float, busy: Sequence[float], context: PlanContext) -> str:
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
    if context.shared_cores:
        return context.shared_cores
    seconds = sum(busy) / max(1, len(busy)) * context.seconds / context.microbatches
    if 0 < seconds < _SHORT_SECONDS:
        return (
            f"a worker computes {seconds * 1e3:.1g} ms for a micro-batch, little compared with the "
            "overhead of each (larger mini-batches, or fewer --microbatches)"
        )
    return ""


def _speed(speed: Speed | None) -> Iterator[str]:
    if speed is None:
        return
    rates = [f"{speed.samples_per_second:.1f} samples/s"]
    if speed.tokens_per_second:
        rates.append(f"{speed.tokens_per_second:.1f} tokens/s")
    yield f"speed: {number(speed.median_step)} s a step (median), {', '.join(rates)}"
    busy = ", ".join(f"{seconds:.1f}" for seconds in speed.busy)
    yield f"busy: {busy} s by worker{f'; data(): {speed.data:.1f} s' if speed.data else ''}"


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts about a job that has ended; None or empty is unknown.

    Attributes:
        loss: of the last step.
        best: the step of the best evaluation, the name of its figure, and the figure.
        checkpoint: the step and the path of the newest checkpoint.
        export: the command that exports its weights.
        best_checkpoint: the step and the path of the checkpoint with the best evaluation.
        export_best: the command that exports its weights.
        resume: the command that resumes the run; "" if its directory was removed.
        profile: the folder with the profiles of steps.
        resumed_at: the steps that were done when the run was resumed.
    """

    verdict: Verdict
    path: str
    context: PlanContext | None = None
    loss: float | None = None
    best: tuple[int, str, float] | None = None
    checkpoint: tuple[int, str] | None = None
    export: str = ""
    best_checkpoint: tuple[int, str] | None = None
    export_best: str = ""
    resume: str = ""
    resumed_at: int = 0
    profile: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary, without the error; none if no step was done."""
        verdict, context = self.verdict, self.context
        if not verdict.steps or (verdict.is_usage_error and verdict.steps == self.resumed_at):
            return
        now = f", {verdict.steps - self.resumed_at} of them now," if self.resumed_at else ""
        steps = f"{plural(verdict.steps, 'step')}{now}"
        yield f"{verdict.status}: {steps} in {verdict.seconds:.1f} s"
        if verdict.stopped_early:
            yield f"stopped early: {verdict.stopped_early}"
        losses = [] if self.loss is None else [f"loss: {number(self.loss)}"]
        if self.best:
            at, name, value = self.best
            figure = f"{'' if name == 'loss' else f'{name} '}{number(value)}"
            losses.append(f"best evaluation: {figure}, {after(at)}")
        if losses:
            yield ", ".join(losses)
        yield from _speed(verdict.speed)
        if context and verdict.speed:
            done = verdict.steps - self.resumed_at
            if wrong := explain_prediction(verdict.speed, done, verdict.busy, context):
                yield f"predicted: {wrong}"
        if context and verdict.busy:
            measured = f"{verdict.bubble:.1%} measured"
            yield f"bubble: {measured}, {context.bubble:.1%} by the schedule"
            if reason := explain_bubble(verdict.bubble, verdict.busy, context):
                yield f"  larger than the schedule's: {reason}"
        if any(verdict.peak_memory):
            yield f"peak memory by worker: {megabytes(verdict.peak_memory)}"
        if self.profile:
            yield f"profile: {self.profile} (https://ui.perfetto.dev opens its files)"
        if self.checkpoint:
            step, path = self.checkpoint
            yield f"weights: {path}{f', after step {step}' if step != verdict.steps else ''}"
            yield f"export: {self.export}"
            if self.best_checkpoint and self.best_checkpoint != self.checkpoint:
                step, path = self.best_checkpoint
                yield f"best weights: {path}, {after(step)}"
                yield f"export them: {self.export_best}"
            yield f"{'train further' if verdict.status == 'done' else 'resume'}: {self.resume}"
        elif self.resume:
            yield "weights: none, because no checkpoint was complete yet (--checkpoint-every)"
            yield f"start again, from step 1: {self.resume}"
        yield f"run directory: {self.path}{'' if self.resume else ', which was removed'}"
