"""A rank of a torchrun job: this process is a worker."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from pipeworker.coordinator.report import describe
from pipeworker.display.style import Style
from pipeworker.display.thread import start_display
from pipeworker.environment import TORCHRUN_JOB, timings
from pipeworker.errors import AGAIN, InUse, PipeworkerError, RendezvousError, UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.host.device_files import remove_device_files
from pipeworker.host.lifetime import die_with_parent, kill_group, signal_with_parent
from pipeworker.host.session_watcher import choose_sockets_folder, share_sockets_folder
from pipeworker.host.streams import flush_files
from pipeworker.job.renamed import written
from pipeworker.ranks import rendezvous
from pipeworker.ranks.coordinator_process import CoordinatorProcess, EventListener
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.record.files.atomic_file import write_json
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import PreparedRun, RunRequest
from pipeworker.timings import DEFAULT
from pipeworker.wire.messages.presence import Abort

_JOB = "job"
"""The name of the job in the rendezvous of its ranks."""
_UNNAMED = "none"
"""Torchrun's name for a job that was given no ``--rdzv-id``."""
_OF_A_HOST = ("interface",)
"""Options that may differ between hosts."""
_FAILED = (1, 2, AGAIN)
"""Exit statuses of a rank that reports a failure."""
_RUN_DIR = "pipeworker/run_dir"
"""A key of torchrun's store, which outlives the ranks that torchrun restarts."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable by which torchrun names the file that it reads a rank's error from."""


def run(rank: RankInfo, request: RunRequest, view: Style) -> int:
    """Run this rank's worker to the end of the job, shown by rank 0; return the exit status."""
    die_with_parent(os.getppid())
    _fork_guard()

    from pipeworker.worker import process
    from pipeworker.worker.model.survey_process import SurveyProcess
    from pipeworker.worker.settings import Settings

    surveys = None if rank.rank else SurveyProcess()  # before any thread is started

    def listen(prepared: PreparedRun) -> EventListener:
        # The worker's output goes to its log; the display keeps the standard output of before.
        style = dataclasses.replace(view, origins=prepared.origins)
        return start_display(prepared.options, prepared.run_dir, style).show

    begin = partial(prepare, rank, request)
    met = rendezvous.rendezvous(rank, _JOB, begin, listen, common_options(request))
    settings = Settings(
        rank.rank,
        met.endpoint,
        met.token,
        rank.local_rank,
        job_file=request.job_file,
        survey=surveys,
    )
    coordinator = met.coordinator
    status = process.run(settings, partial(_leave, coordinator, os.dup(2)), _write_failure)
    flush_files()  # the daemon threads may keep them, and Python then does not
    return coordinator.finish(status) if coordinator else status


def common_options(request: RunRequest) -> dict[str, str]:
    """Return what the command line of each rank must have in common, as it writes it.

    An interface may have another name on each host, and only rank 0 shows the job.
    """
    own = {"run_dir": request.run_dir, "resume": request.resume, "auto_resume": request.auto_resume}
    defaults = {} if request.resume else request.defaults
    chosen = {**own, **defaults, **request.options, "allow_change": request.allow_change}
    words = chosen.pop("arguments", ())
    found = {
        written(name): str(value)
        for name, value in chosen.items()
        if name not in _OF_A_HOST and value not in (None, False, ())
    }
    return {**found, **({"the words after --": shlex.join(words)} if words else {})}


def wait_for_rank_0(mistake: str, *, met: bool) -> None:
    """Give rank 0 time to show a mistake; report it to a rank 0 on another host that may wait.

    `met` is whether rank 0 knows the mistake already, as the ranks had met.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(PipeworkerError):
        info = RankInfo.from_environment()
        if info.rank != info.local_rank and met:
            return  # rank 0 is on another node, and does not end with this one
        if info.agent_serves and info.local_world != info.world:
            rendezvous.report_mistake(info, _JOB, mistake)
            return
    time.sleep(DEFAULT.report)  # not the configured timings: they may be the mistake


def write_error(message: str, details: str = "") -> None:
    """Write this rank's error for torchrun, which shows it in its summary.

    The file has the format of ``torch.distributed.elastic.multiprocessing.errors.record``. The
    first error is kept. It names stage, layer, micro-batch and step, instead of our frames;
    `details` adds the user's traceback.
    """
    if not (path := _error_file()):
        return
    info = {"py_callstack": details or message, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the error is shown elsewhere too
        # torchrun may terminate this rank at any moment, and fails itself at half a file
        write_json(path, {"message": {"message": message, "extraInfo": info}})


def _error_file() -> Path | None:
    """Return the file that torchrun has named for an error, if there is none yet."""
    path = os.environ.get(_ERROR_FILE)
    return Path(path) if path and not Path(path).exists() else None


def prepare(rank: RankInfo, request: RunRequest, restart: int) -> PreparedRun:
    """Prepare a new run on rank 0, or the existing one if torchrun has restarted the ranks.

    `restart` counts how often it has. The number of ranks may have changed: a node was lost, or one
    was added.

    Raises:
        UsageError: something is wrong with the request, or the run that exists was moved.
        RendezvousError: the ranks of before still use the run directory.
    """
    store = rank.open_store() if rank.has_store else None
    before = store.get(_RUN_DIR).decode() if store and store.check([_RUN_DIR]) else ""
    path = str(request.run_dir or before)
    resumes = request.resume or request.auto_resume or restart > 0 or bool(before)
    resumes = resumes or _is_of_this_job(path)
    if before and not RunDir(Path(path)).run.exists():
        raise UsageError(
            f"run directory {path}: is not there any more; to resume a run that was moved, use "
            "--resume with its new --run-dir"
        )
    if resumes and path:
        request = dataclasses.replace(request, run_dir=path, auto_resume=not request.resume)
    is_resume = request.is_resume
    try:
        prepared = request.prepare()
    except InUse as error:
        if resumes:
            raise RendezvousError(str(error)) from None
        raise
    if store:
        store.set(_RUN_DIR, str(prepared.run_dir.path))
        if not is_resume:  # a mistake removes the run; the ranks may be started again
            prepared.undo.callback(store.set, _RUN_DIR, "")
    return prepared


def _is_of_this_job(path: str) -> bool:
    """Return whether a run was last started by this torchrun job.

    When a node is added, torchrun restarts the ranks but does not count that as a restart.
    """
    job = os.environ.get(TORCHRUN_JOB, _UNNAMED)
    if not path or job == _UNNAMED or not RunDir(Path(path)).run.exists():
        return False
    return RunRecord.read(RunDir(Path(path))).last.get("torchrun") == job


def _write_failure(failure: Failure) -> None:
    """Write a failure for torchrun, unless it is only that another rank is gone."""
    if failure.cause is not Cause.PEER:
        write_error(failure.message, describe(failure))


def _leave(coordinator: CoordinatorProcess | None, stderr: int, abort: Abort) -> None:
    """End this process; the control thread calls this while the main thread is in a step.

    Rank 0 has the `coordinator`, and shows the verdict on `stderr`, which is not its log.
    """
    from pipeworker.worker.control import log_end

    if coordinator is None or not os.path.sameopenfile(2, stderr):
        log_end(abort)
    status = coordinator.finish(abort.exit_status) if coordinator else abort.exit_status
    if abort.reason and abort.exit_status in _FAILED and _error_file():
        time.sleep(timings().exit_delay)
        write_error(abort.reason)
    os._exit(AGAIN if abort.exit_status == AGAIN else status)


def _fork_guard() -> None:
    """Fork a process that kills this process group when this process ends, and removes its files.

    Torchrun makes each rank the leader of a group, but does not end the group of a dead rank.
    """
    me, folder = os.getpid(), choose_sockets_folder()
    if os.getpgrp() != me or os.fork():
        share_sockets_folder(folder)
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.setsid()
        signal_with_parent(signal.SIGTERM)
        while os.getppid() == me:
            signal.sigwait({signal.SIGTERM})
        kill_group(me)
        remove_device_files(me)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # this process does so too, if it can
    finally:
        os._exit(0)
