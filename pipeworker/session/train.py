"""``pipeworker.train``, for scripts whose loop is pipeworker's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipeworker.display.commands import Commands, relative
from pipeworker.display.lines import LineDisplay
from pipeworker.display.output import WorkerOutput
from pipeworker.display.style import Style
from pipeworker.display.thread import DisplayThread
from pipeworker.job import file as job_file
from pipeworker.plan.placement import Placement
from pipeworker.ranks.coordinator_process import EventListener
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.runs.begin import PreparedRun
from pipeworker.session.options import NOT_OF_A_SCRIPT, check_options, check_script, script_request
from pipeworker.session.script_hooks import ScriptHooks
from pipeworker.session.session import Session
from pipeworker.wire.lines import Verdict


def train(
    model: Any,
    *,
    loss: Callable[[Any, Any], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]],
    data: Any,
    microbatches: int | None = None,
    scheduler: Callable[..., Any] | None = None,
    scheduler_interval: str = "step",
    before_update: Callable[[list[nn.Parameter]], Any] | None = None,
    evaluation: Any = None,
    metrics: Callable[[Any, Any], Any] | None = None,
    tied: Sequence[Sequence[str]] = (),
    names: Mapping[str, str] | None = None,
    tokens: Callable[[Any], Any] | None = None,
    on_step: Callable[[dict[str, Any]], Any] | None = None,
    on_evaluation: Callable[[dict[str, Any]], Any] | None = None,
    on_checkpoint: Callable[[Path], Any] | None = None,
    callbacks: Sequence[Any] = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    auto_resume: bool = False,
    allow_change: str | Sequence[str] = (),
    log_every: int | None = None,
    quiet: bool = False,
    **options: Any,
) -> Path:
    """Train from a script as ``pipeworker launch`` does from a job file, with the same numbers.

    Every process of the job calls it; see :class:`Pipeline` for which these are, and for the
    arguments that both have. The others are as in a job file, or options of ``pipeworker launch``
    with underscores: ``epochs=3``, ``evaluate_every=100``. Rank 0 prints a line per step, at most
    one a second or every `log_every` steps; if `quiet`, only warnings. It also calls `on_step`,
    `on_evaluation` and `on_checkpoint`, and the methods of these names of `callbacks`, in this
    thread, between two steps.

    With `resume` it continues the run in `run_dir`, with `auto_resume` if there is one. The run
    keeps its options unless others are given here. Those that change its numbers must be named:
    ``allow_change=["seed"]``.

    An interrupt (Ctrl-C) takes effect after the step that runs, which is saved; a second one takes
    effect at once.

    Returns:
        The run directory, on every rank.

    Raises:
        UsageError: an argument is wrong.
        LayerError: the user's code raised on this rank.
        PipeworkerError: the job failed on another rank.
        KeyboardInterrupt: the job was interrupted.
    """
    where = "pipeworker.train()"
    check_script(where)
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
            names={} if names is None else names,
            tokens=tokens,
            on_step=on_step,
            on_evaluation=on_evaluation,
            on_checkpoint=on_checkpoint,
            callbacks=callbacks,
        ),
        where,
    )
    check_options(options, NOT_OF_A_SCRIPT, where)
    info = RankInfo.detect()
    requested = {**options, "microbatches": microbatches}
    request = script_request(
        requested,
        run_dir,
        allow_change,
        where,
        ranks=info.world,
        resume=resume,
        auto_resume=auto_resume,
    )
    commands = Commands(script=relative(request.job_file))
    style = Style(quiet=quiet, log_every=log_every, commands=commands)
    session = Session(info, job, request, listen=partial(_display, style))
    hooks = ScriptHooks(job, session)
    try:
        session.run(between=hooks.call_new)
    finally:
        hooks.call_new(final=True)
    return session.worker.loaded.run_dir.path


def _display(style: Style, run: PreparedRun) -> EventListener:
    """Display lines in the script's own output, which already has the output of its ranks."""
    run_dir = run.run_dir
    display = _ScriptDisplay(run.options, run_dir, style)
    none = WorkerOutput(run_dir, "none", Placement.identity(1))
    return DisplayThread(display, none).show


class _ScriptDisplay(LineDisplay):
    """Shows everything except the error of the job, which is raised."""

    def end(self, verdict: Verdict) -> None:
        if not verdict.job_exited:
            super().end(dataclasses.replace(verdict, error=None))
