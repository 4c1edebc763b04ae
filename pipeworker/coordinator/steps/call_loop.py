"""The loop of the user's own: each command of the job is a call that all ranks make. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeworker.coordinator.effects import JobState
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.steps.loop import BaseLoop, Due, FileLoop, content_of
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.step import Evaluation
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.directions import Finish
from pipeworker.wire.messages.step import (
    Call,
    CallKind,
    EpochEnded,
    Evaluate,
    Loaded,
    RunStep,
    StepDone,
    Wait,
)


class CallLoop(BaseLoop):
    """The loop of the user's own: each command is a call that all ranks have made."""

    stopped_early = ""

    def __init__(self, options: Options, placement: Placement, progress: Progress) -> None:
        super().__init__(options, placement, progress)
        self._calls: dict[int, Call] = {}  # of the current round, by rank
        self._current: CallKind | None = None
        self._reply: Wait | None = Wait()

    @property
    def finished(self) -> bool:
        return self._current is CallKind.CLOSE

    @property
    def predicts(self) -> bool:
        """Whether the current pass is a prediction, which has no result here."""
        return self._current is CallKind.PREDICT

    def step_done(self, done: Sequence[StepDone], now: float) -> Due:
        assert self._batch
        self._tally.add(done, self._batch)
        self._current = None
        if self._half_done:
            return Due()
        result, _, due = self._complete(self._batch, now)
        self._reply = Wait(result)
        return due

    def evaluation_done(self, evaluation: Evaluation) -> Due:
        if failure := self._lacking(evaluation):
            return self._reply_to_all(Wait(failure))
        self._current, self._reply = None, Wait(evaluation)
        self._progress.evaluation, self._progress.outdated = evaluation, True
        return Due(self._evaluated(evaluation), (evaluation,), can_save=not self._half_done)

    def pass_done(self, failure: Failure | None) -> Due:
        """Return what is due after a prediction, or after a pass that failed on some rank."""
        return self._reply_to_all(Wait(failure))

    def _reply_to_all(self, reply: Wait) -> Due:
        """End the current call with this reply."""
        self._current, self._reply = None, reply
        return Due()

    def call_received(self, call: Call) -> Due | None:
        """Return what is due after a call of the user's loop; None while ranks are awaited."""
        ranks = self.placement.ranks
        if len(self._calls) == ranks:  # the last round is complete
            self._calls.clear()
        self._calls[call.rank] = call
        if mismatch := self._mismatch(call):
            return Due(failure=Failure(Cause.USAGE, mismatch))
        if len(self._calls) < ranks:
            return None
        if mistake := self._mistake():
            if self._half_done:
                return Due(failure=mistake)
            return self._reply_to_all(Wait(mistake))
        self._current = call.kind
        if call.loaded is not None:
            self._resume_from(call.loaded)
        if call.kind is CallKind.END_EPOCH:
            self._progress.end_epoch()
            return Due(EpochEnded(self._progress.steps))
        self._progress.outdated |= any(one.changed for one in self._calls.values())
        return Due(must_save=call.kind is CallKind.SAVE)

    def _mismatch(self, call: Call) -> str:
        """Return how a call differs from the others of its round, or ""."""
        first = next(iter(self._calls.values()))
        name = self.placement.names
        if call.mistake or first.mistake:  # no rank performs the call, whatever its arguments
            same = call.kind is first.kind
        else:
            same = _common(call) == _common(first)
        if same:
            return ""
        return (
            f"the script: {name(first.rank)} called {_source(first)} while {name(call.rank)} "
            f"called {_source(call)}; make the same calls in the same order on every rank"
        )

    def _mistake(self) -> Failure | None:
        """Return what is wrong with the arguments of the round's calls, if anything."""
        for call in self._calls.values():
            if call.mistake:
                return Failure(Cause.USAGE, call.mistake, call.rank)
        if call.kind is not CallKind.STEP:
            return None
        ranks = self.placement.ranks_of(0)
        batches = [self._calls[rank].batch for rank in ranks]
        if batches[0] is None:
            text = "step(): the first stage was given no mini-batch; pass one on its rank"
            return Failure(Cause.USAGE, text, ranks[0])
        if self._options.data_reader == "first":
            return None
        for replica, batch in enumerate(batches):
            text = ""
            if batch is None:
                text = (
                    f"step(): the first stage of replica {replica} was given no mini-batch; pass "
                    "the whole mini-batch on each replica"
                )
            elif content_of(batch) != content_of(batches[0]):
                text = (
                    f"step(): replica {replica} was given another mini-batch than replica 0; pass "
                    "the whole mini-batch on each replica, which takes its part of it"
                )
            if text:
                return Failure(Cause.USAGE, text, ranks[replica])
        return None

    def _resume_from(self, loaded: Loaded) -> None:
        progress = self._progress
        scaler = progress.scaler and LossScaler(
            loaded.scale or LossScaler().scale, loaded.good_steps
        )
        progress.roll_back(JobState(loaded.step, scaler, epoch=loaded.epoch))
        progress.saved = -1  # a checkpoint of the same step may be another run's
        self._step = progress.recorded = progress.evaluated = loaded.step

    def next(self, now: float) -> RunStep | Evaluate | Wait | Finish | None:
        match self._current:
            case CallKind.STEP:
                call = self._calls[self.placement.rank_of(0)]
                assert call.batch
                batch = self._batch = replace(call.batch, epoch=self._progress.epoch)
                more, last = self._half_done, call.last
                self._half_done = not last
                return self._run(batch, last=last) if more else self._begin(batch, now, last=last)
            case CallKind.CLOSE:
                return Finish()
            case CallKind.EVALUATE | CallKind.PREDICT:
                return Evaluate(self._progress.steps)
            case CallKind.SAVE | CallKind.LOAD | CallKind.END_EPOCH:
                self._current = None
                return Wait()
            case None:
                reply, self._reply = self._reply, None
                return reply


def _common(call: Call) -> Call:
    """Return a call without what may differ between ranks."""
    return replace(call, rank=0, batch=None, changed=False)


def _source(call: Call) -> str:
    """Return a call as the user wrote it."""
    if loaded := call.loaded:
        checksum = f", checksum {loaded.checksum}" if loaded.checksum else ""
        return f"load(a checkpoint of step {loaded.step}{checksum})"
    if call.kind is CallKind.LOAD:
        return "load(checkpoint)"
    if call.kind in (CallKind.SAVE, CallKind.END_EPOCH, CallKind.CLOSE):
        return f"{call.kind.value}()"
    more = ", everywhere=True" if call.everywhere else "" if call.last else ", of several"
    return f"{call.kind.value}(batch{more})"


Loop = FileLoop | CallLoop
"""The source of a generation's commands."""
