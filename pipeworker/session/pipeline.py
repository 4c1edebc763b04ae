"""``pipeworker.Pipeline``, for a training loop of one's own, and ``pipeworker.train``."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.job.options import Options
from pipeworker.record.checkpoint import Checkpoint
from pipeworker.record.rundir import find
from pipeworker.session.begin import Asked, Begun
from pipeworker.session.head import Hear
from pipeworker.session.place import Place
from pipeworker.session.session import Session, script
from pipeworker.session.show.output import Output
from pipeworker.session.show.plain import Show
from pipeworker.session.show.screen import Screen
from pipeworker.session.show.view import View
from pipeworker.wire.lines import FromCoordinator, Verdict, Warned
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import Call, CallKind, Loaded
from pipeworker.wire.messages.evaluation import Evaluate, Evaluation
from pipeworker.wire.messages.step import StepResult

_OF_LAUNCH = ("restarts", "snapshot_every", "elastic")  # which can start a worker again
_NOT_HERE = ("job_file", "stages", "arguments", "own_loop", "resume", "resume_step", *_OF_LAUNCH)
_OF_TRAIN = (
    *("steps", "epochs", "accumulate", "evaluate_every"),
    *("checkpoint_every", "checkpoint_busy", "keep"),
)


class Pipeline:
    """A model as a pipeline over the processes of this job, one stage in each.

    Every process makes the same calls in the same order. Only what the first stage is given counts;
    the others may give the same, or None. With ``replicas=R`` the processes are R pipelines, one
    behind the other; the first stage of each is given the whole mini-batch and takes its part of
    it. Processes are those of a torchrun job; or any that have
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment; or those of the default
    process group; or, without any of these, this one alone.

    The numbers are those of ``pipeworker launch`` for the same mini-batches: bitwise equal for
    every number of stages. The process's random streams are left as they are.

    Args:
        model: a function that gives an ``nn.Sequential`` or a list of layers, called under the
            job's seed; or one of these itself, the same on all ranks, whose modules are then the
            ones that train. Entries of a list may be functions that build a layer.
        loss: ``loss(output, target)``, a scalar mean over its samples or a pair (sum, count).
        optimizer: ``optimizer(params)`` gives the optimizer of a stage.
        microbatches: M over all replicas, by default four a stage of each.
        scheduler: ``scheduler(optimizer)`` gives a scheduler, stepped once a step; a
            ``ReduceLROnPlateau`` after each :meth:`evaluate`.
        before_update, metrics, tied: as in a job file.
        sample: an input of the model; needed where layers stash and pop, to see where they lead.
        run_dir: where the job is recorded, by default ``runs/<script>-<time>``.
        options: of ``pipeworker launch``, with underscores: ``recompute="never"``, ``seed=1``.

    Raises:
        UsageError: something is wrong with these.
        LayerError: building a layer failed here.
        PipeworkerError: the job failed elsewhere.
    """

    def __init__(
        self,
        model: Any,
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        microbatches: int | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        before_update: Callable[[list[nn.Parameter]], Any] | None = None,
        metrics: Callable[[Any, Any], Any] | None = None,
        tied: Sequence[Sequence[str]] = (),
        sample: Any = None,
        run_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        where = "pipeworker.Pipeline()"
        job = job_file.check(
            SimpleNamespace(
                model=model,
                loss=loss,
                optimizer=optimizer,
                scheduler=scheduler,
                before_update=before_update,
                metrics=metrics,
                tied=tied,
            ),
            where,
            ("model", "loss", "optimizer"),
        )
        _check_names(options, (*_NOT_HERE, *_OF_TRAIN), where)
        place = Place.found()
        said = {**options, "microbatches": microbatches, "own_loop": True}
        self._session = Session(
            place,
            job,
            Asked(script(), None, said, run_dir, ranks=place.world),
            sample=sample,
            listen=lambda _: _warn,
        )
        self._rank = place.rank
        self._session.join()
        placement = self._session.worker.placement
        self.stage = placement.stages_of(place.rank)[0]
        self.stages = placement.stages
        self.replica = placement.replica_of(place.rank)
        self.replicas = placement.replicas

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of this stage, by their index in the model."""
        stages = self._session.worker.stages.values()
        return {i: layer for s in stages for i, layer in enumerate(s.layers, s.first)}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This stage's optimizer; None where nothing trains."""
        return self._session.worker.optimizer

    @property
    def run_dir(self) -> Path:
        """Where the job is recorded."""
        return self._session.worker.run_dir.path

    def step(self, *batches: Any) -> StepResult:
        """Train on a mini-batch, or on several whose gradients are accumulated, and update.

        Args:
            batches: pairs (input, target); dim 0 of every tensor is the batch.

        Returns:
            What the whole step gave, on every stage.

        Raises:
            UsageError: a mini-batch is not such a pair, or ranks made different calls.
            LayerError: the user's code raised on this stage.
            PipeworkerError: the job failed elsewhere.
        """
        session = self._session
        with session.inside():
            if not batches:
                raise UsageError("step() was given no mini-batch")
            for number, batch in enumerate(batches, 1):
                offered = session.worker.offer(batch)
                last = number == len(batches)
                call = Call(self._rank, CallKind.STEP, offered, last)
                session.perform(session.call(call))
            result = session.given()
        assert isinstance(result, StepResult)
        return result

    def evaluate(self, *batches: Any) -> dict[str, float]:
        """The loss and the metrics over one or several mini-batches, forward alone, in eval mode.

        Args:
            batches: as of :meth:`step`; they stream through the stages without a gap.

        Returns:
            On every stage ``loss`` and each metric, averaged by sample over all of them.

        Raises:
            UsageError, LayerError, PipeworkerError: as :meth:`step`.
        """
        session = self._session
        with session.inside():
            if not batches:
                raise UsageError("evaluate() was given no mini-batch")
            step = self._begin(Call(self._rank, CallKind.EVALUATE))
            cut = (session.worker.cut(b, "evaluate(batch) was given") for b in batches)
            with session.working():
                done = session.worker.evaluate(step, cut)
            session.send(done)
            result = session.given()
        assert isinstance(result, Evaluation)
        return result.row()

    def predict(self, value: Any, *, everywhere: bool = False) -> Any:
        """The model's output for a batch of inputs, in eval mode.

        Args:
            value: what the first layer is called with; dim 0 of every tensor is the batch.
            everywhere: whether every stage wants the output.

        Returns:
            The output for the whole batch on the last stage, or on all of them; elsewhere None.

        Raises:
            UsageError: as :meth:`step`, and when the output is not a batch.
            LayerError, PipeworkerError: as :meth:`step`.
        """
        session = self._session
        with session.inside():
            step = self._begin(Call(self._rank, CallKind.PREDICT, everywhere=everywhere))
            cut = (session.worker.cut((v, None), "predict(input) was given") for v in (value,))
            with session.working():
                return session.worker.predict(step, cut, everywhere=everywhere)

    def save(self) -> Path:
        """Write a checkpoint of the state as it is, on all ranks together.

        Returns:
            Its folder, which is there, whole, on every rank that sees rank 0's disk.

        Raises:
            PipeworkerError: it cannot be written, or the job failed.
        """
        session = self._session
        with session.inside():
            session.perform(session.call(Call(self._rank, CallKind.SAVE)))
            session.given()
            return session.worker.run_dir.checkpoint(session.worker.saved)

    def load(self, checkpoint: str | Path) -> int:
        """Go on from a checkpoint, whatever number of stages has written it.

        Weights, optimizer, scheduler and loss scale are then those of its step; where the loop is
        in its data is its own business.

        Args:
            checkpoint: its folder, or a run directory, of which the last complete one is taken.

        Returns:
            The steps that were done.

        Raises:
            UsageError: there is none, it is damaged, or it is of another model.
            PipeworkerError: the job failed elsewhere.
        """
        session = self._session
        with session.inside():
            source = Checkpoint(find(Path(checkpoint)))
            source.verify()
            scaler = source.manifest.scaler or {}
            step = source.manifest.step
            loaded = Loaded(step, scaler.get("scale", 0.0), scaler.get("good_steps", 0))
            session.perform(session.call(Call(self._rank, CallKind.LOAD, loaded=loaded)))
            with session.working():
                session.worker.restore(source.shards())
            return step

    def _begin(self, call: Call) -> int:
        """Wait for all ranks to make a call that changes no weight; returns the steps done."""
        told = self._session.call(call)
        assert isinstance(told, Advance)
        assert isinstance(told.next, Evaluate)
        return told.next.step

    def close(self) -> None:
        """Save the weights and the optimizer's state, and end the job. Idempotent.

        A script that ends without an exception closes what it has left open.

        Raises:
            PipeworkerError: the job failed.
        """
        if not self._session.closed:
            self._session.finish()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._session.left_by(error)


def train(
    model: Any,
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    data: Any,
    microbatches: int | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    scheduler_interval: str = "step",
    before_update: Callable[[list[nn.Parameter]], Any] | None = None,
    evaluation: Any = None,
    metrics: Callable[[Any, Any], Any] | None = None,
    tied: Sequence[Sequence[str]] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    allow: str | Sequence[str] = (),
    log_every: int | None = None,
    quiet: bool = False,
    **options: Any,
) -> Path:
    """Train from a script, as ``pipeworker launch`` does from a job file; numbers are the same.

    Every process of the job calls it; which those are is as for :class:`Pipeline`. Rank 0 prints
    lines of steps, at most one a second.

    Args:
        model, loss, optimizer: as for :class:`Pipeline`.
        data, evaluation, metrics, scheduler, scheduler_interval, before_update, tied: as in a job
            file.
        resume: the run in `run_dir` goes on, with its options where none are given here.
        allow: options of it that may change although its numbers do, as ``["seed"]``.
        log_every: steps between lines; None for at most one a second.
        quiet: only warnings are printed.
        options: of ``pipeworker launch``, with underscores: ``epochs=3``, ``evaluate_every=100``.

    Returns:
        The run directory, on every stage.

    Raises:
        UsageError: something is wrong with these.
        LayerError: the user's code raised on this stage.
        PipeworkerError: the job failed elsewhere.
    """
    where = "pipeworker.train()"
    job = job_file.check(
        SimpleNamespace(
            model=model,
            loss=loss,
            optimizer=optimizer,
            data=data,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            before_update=before_update,
            evaluation=evaluation,
            metrics=metrics,
            tied=tied,
        ),
        where,
    )
    _check_names(options, _NOT_HERE, where)
    place = Place.found()
    said = {**options, "microbatches": microbatches}
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    session = Session(
        place,
        job,
        Asked(script(), None, said, run_dir, resume, allow=allowed, ranks=place.world),
        listen=partial(_shown, View(quiet=quiet, log_every=log_every)),
    )
    session.run()
    return session.worker.run_dir.path


def _check_names(options: dict[str, Any], elsewhere: Sequence[str], where: str) -> None:
    known = [f.name for f in dataclasses.fields(Options) if f.name not in elsewhere]
    for name in options:
        if name not in known:
            raise UsageError(f"{where} has no option {name!r}: it has {', '.join(sorted(known))}")


def _shown(view: View, begun: Begun) -> Hear:
    """Lines on the script's own output; what its ranks print is there already."""
    options, run_dir = begun.options, begun.run_dir
    lines = _Lines(options, str(run_dir.path), view)
    return Screen(lines, Output(run_dir, "none", options.stages)).hear


class _Lines(Show):
    """Says all but how the job failed, which is raised."""

    def ended(self, verdict: Verdict) -> None:
        if not verdict.own:
            super().ended(dataclasses.replace(verdict, error=None))


def _warn(event: FromCoordinator) -> None:
    if isinstance(event, Warned):
        with contextlib.suppress(OSError):  # the output is the script's
            print(
                f"{'note' if event.note else 'warning'}: {event.text}", file=sys.stderr, flush=True
            )
