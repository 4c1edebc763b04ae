"""``pipeworker.Pipeline``, for training loops of the user's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError, reading
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.host.signals import USUAL, deferred_interrupt
from pipeworker.job import file as job_file
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.files.located import located
from pipeworker.record.rundir import find_checkpoint
from pipeworker.session.errors import is_regular_end
from pipeworker.session.options import (
    NOT_OF_A_LOOP,
    check_options,
    check_script,
    checked_path,
    script_request,
)
from pipeworker.session.process import OPEN_PIPELINES
from pipeworker.session.session import Session
from pipeworker.wire.lines import FromCoordinator, Warned
from pipeworker.wire.messages.step import Call, CallKind, Evaluate, EvaluationDone, Loaded
from pipeworker.worker.data.reader import MicroBatches


class Pipeline:
    """A model as a pipeline over the processes of this job.

    Every process makes the same calls in the same order. Only the arguments on the rank of the
    first stage count; other ranks may pass the same, or None. With ``replicas=R`` the processes
    are R pipelines, one after the other; pass the whole mini-batch on the first stage of each
    replica, which takes its part of it.

    The processes are the ones of the default process group, if there is one; else the ones of a
    torchrun job, or any that have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their
    environment; else this one alone.

    For the same mini-batches the numbers are bitwise equal to those of ``pipeworker launch``, for
    every number of stages. The random streams of the process are not changed.

    Args:
        model: a function that returns an ``nn.Module`` or a list of layers, called under the job's
            seed; or one of these itself, equal on all ranks, whose own modules are then trained.
            Entries of a list may be functions that build a layer.
        loss: ``loss(output, target)`` returns a scalar mean over its samples, or a pair (sum,
            count) of scalars.
        optimizer: ``optimizer(params)`` returns the optimizer of a stage, or a list of them.
        microbatches: over all replicas; by default four for each stage of each replica.
        scheduler: ``scheduler(optimizer)`` returns a scheduler, which is stepped once a step; a
            ``ReduceLROnPlateau`` is stepped after each :meth:`evaluate`. For a list of optimizers
            it returns a list.
        scheduler_interval: ``"epoch"`` to step the scheduler at each :meth:`end_epoch` instead.
        before_update: as in a job file; so are `metrics`, `tied`, `names` and `tokens`.
        metrics: see `before_update`.
        tied: see `before_update`.
        names: see `before_update`.
        tokens: see `before_update`; counts those of each mini-batch of :meth:`step`.
        sample: an input of the model; required to cut a module that is no ``nn.Sequential``, and
            to find the skip connections of layers that stash and pop.
        run_dir: the run directory, by default ``runs/<script>-<time>``.
        resume: continue the run in `run_dir` from its last checkpoint: weights, optimizer,
            scheduler, loss scale and epoch. The script begins its data at :attr:`steps_done`.
        auto_resume: the same if `run_dir` holds a run; else begin one there.
        allow_change: names of options that may differ from those of the run to resume.
        **options: as of ``pipeworker launch``, with underscores: ``recompute="never"``.

    Attributes:
        stage: the first stage of this process, from 0.
        stages: the number of stages of a replica.
        replica: the replica of this process, from 0.
        replicas: the number of replicas.

    Raises:
        UsageError: an argument is wrong.
        LayerError: building a layer failed on this rank.
        PipeworkerError: the job failed on another rank.
    """

    def __init__(
        self,
        model: Any,
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: Callable[[Any], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]],
        microbatches: int | None = None,
        scheduler: Callable[..., Any] | None = None,
        scheduler_interval: str = "step",
        before_update: Callable[[list[nn.Parameter]], Any] | None = None,
        metrics: Callable[[Any, Any], Any] | None = None,
        tied: Sequence[Sequence[str]] = (),
        names: Mapping[str, str] | None = None,
        tokens: Callable[[Any], Any] | None = None,
        sample: Any = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        auto_resume: bool = False,
        allow_change: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        where = "pipeworker.Pipeline()"
        check_script(where)
        job = job_file.check(
            SimpleNamespace(
                model=model,
                loss=loss,
                optimizer=optimizer,
                scheduler=scheduler,
                scheduler_interval=scheduler_interval,
                before_update=before_update,
                metrics=metrics,
                tied=tied,
                names={} if names is None else names,
                tokens=tokens,
            ),
            where,
            ("model", "loss", "optimizer"),
        )
        check_options(options, NOT_OF_A_LOOP, where)
        info = RankInfo.detect()
        requested = {**options, "microbatches": microbatches, "own_loop": True}
        self._session = Session(
            info,
            job,
            script_request(
                requested,
                run_dir,
                allow_change,
                where,
                ranks=info.world,
                resume=resume,
                auto_resume=auto_resume,
            ),
            sample=sample,
            listen=lambda _: _print_warning,
        )
        self._rank = info.rank
        self._session.build()
        role = self._session.worker.loaded.role
        placement, self._steps_done, self._epoch = role.placement, role.options.resume_step, 0
        if role.options.resume:
            path = located(self._session.worker.loaded.run_dir.checkpoints.at(self._steps_done))
            self._epoch = Checkpoint(Path(path)).manifest.epoch
        self.stage = placement.stages_of(info.rank)[0]
        self.stages = placement.stages
        self.replica = placement.replica_of(info.rank)
        self.replicas = placement.replicas
        if info.world == 1:  # several ranks would not end at the same time
            OPEN_PIPELINES.add(self, self._session.end)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of this process, by their index in the model."""
        stages = self._session.worker.planned.stages.stages.values()
        return {i: layer for s in stages for i, layer in enumerate(s.layers, s.first)}

    @property
    def optimizer(self) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """The optimizer of this process, or the list of them; None if it has nothing to train."""
        return self._session.worker.planned.stages.optimizers.returned

    @property
    def steps_done(self) -> int:
        """The number of steps done, also before the run was resumed or a checkpoint loaded."""
        return self._steps_done

    @property
    def epoch(self) -> int:
        """The number of epochs ended, also before the run was resumed or a checkpoint loaded.

        It is the number of the current epoch, from 0, as in the rows of ``metrics.jsonl``. A
        checkpoint of ``launch`` or ``train`` has none, so it is 0 after :meth:`load` of one.
        """
        return self._epoch

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._session.worker.loaded.run_dir.path

    def step(self, *batches: Any) -> StepResult:
        """Train on a mini-batch, or on several whose gradients are accumulated, and update.

        Args:
            *batches: pairs (input, target); dim 0 of every tensor is the batch.

        Returns:
            The result of the whole step, the same on every rank.

        Raises:
            UsageError: a mini-batch is not such a pair, or ranks made different calls.
            LayerError: the user's code raised on this rank.
            PipeworkerError: the job failed on another rank.
        """
        with self._session.participating() as session:
            worker = session.worker

            def read() -> MicroBatches | None:
                if not batches:
                    raise UsageError("step(): there is no mini-batch; pass at least one")
                worker.check(batches[1:])  # before anything runs
                return worker.read(batches[0])

            batch = session.prepare(CallKind.STEP, read)
            for left in range(len(batches) - 1, -1, -1):
                facts = batch.batch if batch else None
                command = session.call(Call(self._rank, CallKind.STEP, facts, last=not left))
                worker.offer(batch)
                session.perform(command)
                batch = worker.read(batches[-left]) if left else None
            result = session.wait_for_result()
        assert isinstance(result, StepResult)
        self._steps_done = result.step
        return result

    def end_epoch(self) -> None:
        """End an epoch: step the scheduler if ``scheduler_interval="epoch"``, and count.

        Call it after the last step of each epoch. Evaluations and checkpoints after it have the new
        learning rate.

        Raises:
            UsageError: ranks made different calls.
            LayerError: the scheduler raised on this rank.
            PipeworkerError: the job failed on another rank.
        """
        with self._session.participating() as session:
            session.perform(session.call(Call(self._rank, CallKind.END_EPOCH)))
        self._epoch += 1

    def evaluate(self, *batches: Any) -> dict[str, float]:
        """Compute the loss and the metrics over mini-batches, in eval mode and without backward.

        Returns:
            ``loss`` and each metric, averaged by sample over all mini-batches, on every rank.

        Raises:
            UsageError: as :meth:`step`, whose other errors it raises too.
        """
        with self._session.participating() as session:
            worker, prefix = session.worker, "evaluate(batch): was given"

            def check() -> None:
                if not batches:
                    raise UsageError("evaluate(): there is no mini-batch; pass at least one")
                worker.check(batches, prefix)

            session.prepare(CallKind.EVALUATE, check)
            step = self._begin(Call(self._rank, CallKind.EVALUATE))
            cut = (worker.split(batch, prefix) for batch in batches)
            result = session.stream(step, lambda: worker.evaluate(step, cut, stays=True))
        assert isinstance(result, Evaluation)
        return result.row()

    def predict(self, value: Any, *, everywhere: bool = False) -> Any:
        """Compute the model's output for a batch of inputs, in eval mode.

        Args:
            value: the input of the first layer; dim 0 of every tensor is the batch.
            everywhere: return the output on every rank, not only on that of the last stage.

        Raises:
            UsageError: as :meth:`step`, whose other errors it raises; or the output is no batch.
        """
        with self._session.participating() as session:
            worker, prefix = session.worker, "predict(input): was given"

            def check() -> None:
                if not isinstance(everywhere, bool):
                    raise UsageError(
                        f"predict(): everywhere is {everywhere!r}; make it True or False"
                    )
                worker.check([(value, None)], prefix)

            session.prepare(CallKind.PREDICT, check)
            step = self._begin(Call(self._rank, CallKind.PREDICT, everywhere=everywhere))
            cut = (worker.split((v, None), prefix) for v in (value,))
            output: list[Any] = []

            def predict() -> EvaluationDone:
                done, found = worker.predict(step, cut, everywhere=everywhere)
                output.append(found)
                return done

            session.stream(step, predict)
            if not everywhere:
                return output[0]
            with session.working():
                return worker.broadcast(output[0])

    def save(self) -> Path:
        """Write a checkpoint of the present state, on all ranks together.

        Returns:
            Its folder, which is complete for every rank that shares rank 0's file system.

        Raises:
            PipeworkerError: it cannot be written, or the job failed on another rank.
        """
        with self._session.participating() as session:
            session.perform(session.call(Call(self._rank, CallKind.SAVE)))
            session.wait_for_result()
            saved = session.worker.connected.state.saved
            return Path(located(session.worker.loaded.run_dir.checkpoints.at(saved)))

    def load(self, checkpoint: str | Path) -> int:
        """Load a checkpoint that any number of stages has written; return its number of steps.

        It restores weights, optimizer, scheduler and loss scale; and :attr:`epoch`, which is 0 in a
        checkpoint of ``launch`` or ``train``. The position in the data is up to the caller's loop.

        Args:
            checkpoint: its folder, or a run directory, whose last complete checkpoint is loaded.

        Raises:
            UsageError: there is no checkpoint, it is damaged, or it is of another model.
        """
        with self._session.participating() as session:
            state = session.worker.connected.state

            def find() -> Checkpoint:
                path = checked_path("load(): checkpoint", checkpoint)
                with reading(path):
                    source = Checkpoint(find_checkpoint(path))
                source.verify()
                state.check_fits(source.worker_files())
                return source

            source = session.prepare(CallKind.LOAD, find)
            manifest = source.manifest
            step, scaler, epoch = manifest.step, manifest.scaler or {}, manifest.epoch
            scale, good_steps = scaler.get("scale", 0.0), scaler.get("good_steps", 0)
            loaded = Loaded(step, scale, good_steps, epoch, manifest.checksum)
            session.perform(session.call(Call(self._rank, CallKind.LOAD, loaded=loaded)))
            with session.working(), deferred_interrupt(USUAL):
                state.restore(source.worker_files())
            self._steps_done, self._epoch = step, epoch
            return step

    def _begin(self, call: Call) -> int:
        """Wait for all ranks to make a call that changes no weight; return the steps done."""
        command = self._session.call(call)
        assert isinstance(command.next, Evaluate)
        return command.next.step

    def close(self) -> None:
        """Save the weights and the optimizer's state, and end the job. Idempotent.

        At the end of a script without an exception, pipelines that are still open are closed. In a
        child that this process has forked, the call does nothing.
        """
        self._session.finish()

    def __enter__(self) -> Pipeline:
        self._session.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or is_regular_end(error):
            self.close()
        else:
            self._session.fail(error)


def _print_warning(event: FromCoordinator) -> None:
    if isinstance(event, Warned):
        kind = "note" if event.note else "warning"
        with contextlib.suppress(OSError):  # the stream belongs to the script
            print(f"{kind}: {event.text}", file=sys.stderr, flush=True)
