"""The process around the coordinator's state machine: sockets and the clock, but no decisions.

It runs as a process of its own (:func:`main`), and imports neither torch nor the user's code.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import zmq
from typing_extensions import assert_never

from pipeworker.coordinator import effects, events
from pipeworker.coordinator.effects import JobState
from pipeworker.coordinator.ending import Status
from pipeworker.coordinator.io import result_thread
from pipeworker.coordinator.io.files import LogFile, RunFiles, record_error
from pipeworker.coordinator.io.parent import ParentProcess
from pipeworker.coordinator.io.result_thread import ResultThread
from pipeworker.coordinator.io.workers import WorkerConnections
from pipeworker.coordinator.job import Job
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.steps.progress import Start
from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError, UnreadableFile, UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.host.descriptors import DescriptorReserve, check_available, check_tasks
from pipeworker.host.lifetime import signal_with_parent
from pipeworker.host.suspend_clock import SuspendAwareClock
from pipeworker.job.options import Options
from pipeworker.job.planning import plan_job
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest
from pipeworker.record.facts_cache import FactsCache, default_folder
from pipeworker.record.files.located import located
from pipeworker.record.lock import RunLock
from pipeworker.record.metrics import rows
from pipeworker.record.plan_file import PlanFile
from pipeworker.record.run_record import write_summary
from pipeworker.record.rundir import Request, RunDir
from pipeworker.wire import lines, sockets
from pipeworker.wire.lines import Activity, Configuration, Joined, Planned, Restart, Snapshot
from pipeworker.wire.messages.checkpoint import Restore

_WATCHED, _LOOK = 5.0, 0.5
"""Seconds for which one request has the job write what its workers do, and between two writes."""

log = logging.getLogger("pipeworker.coordinator")


class Service:
    """The coordinator of one job, with its bound control socket and descriptors for its files."""

    def __init__(
        self,
        configuration: lines.Configuration,
        socket: sockets.Router,
        descriptors: DescriptorReserve,
        parent: ParentProcess,
        run_dir: RunDir,
    ) -> None:
        self._configuration, self._socket, self._parent = configuration, socket, parent
        self._options = Options.from_json(configuration.options)
        self._timings = timings()
        self._cache = FactsCache(default_folder())
        self._run_dir, self._path = run_dir, configuration.run_dir
        self._job = Job(
            self._options,
            configuration.run_dir,
            time.monotonic(),
            timings=self._timings,
            generation=configuration.generation,
            replaceable=configuration.slots > 1,
            launched=configuration.parent_rank < 0,
            start=self._start(),
            cores=len(os.sched_getaffinity(0)),
        )
        self._disk, self._planner = ResultThread("disk"), ResultThread("planner")
        self._files = RunFiles(
            self._run_dir,
            self._options,
            descriptors,
            parent,
            self._disk,
            self._handle,
            lambda: self._job.restored_step,
        )
        self._workers = WorkerConnections(
            socket, self._handle, lambda: self._job.generation.number, self._timings.redial
        )
        self._parent_reads, self._interrupted = True, False
        self._watched_until = self._next_look = 0.0
        self._verdict: lines.Verdict | None = None

    def _start(self) -> Start:
        options = self._options
        start = read_start(self._configuration, options, self._run_dir)
        if not options.is_planned:
            return start
        known = {} if options.no_profile else self._cache.read()
        return replace(
            start, facts=recorded_facts(self._run_dir) if start.causes else None, known=known
        )

    def run(self, endpoint: str) -> int:
        """Run the job, whose control socket is bound to `endpoint`; return the exit status."""
        parent = self._parent
        parent.send(lines.Bound(endpoint))
        self._files.open_extras()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to the whole job; workers report it
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        threads = self._disk, self._planner
        for thread in threads:
            poller.register(thread.reads, zmq.POLLIN)
        next_tick = next_ping = time.monotonic()
        clock, suspended = SuspendAwareClock(self._timings.tick + self._timings.burst), 0.0
        while self._verdict is None:
            poller.register(parent.reads, 0 if parent.gone else zmq.POLLIN)
            poller.register(parent.writes, zmq.POLLOUT if parent.pending else 0)
            ready = dict(poller.poll(int(1000 * self._timings.tick)))
            if self._path != (path := str(self._run_dir.path)):  # first: workers that join open it
                self._path = path
                self._handle(events.Moved(path))
            all_received = self._socket not in ready or self._receive()
            if parent.writes in ready:
                parent.flush()
            now, awake = time.monotonic(), clock.now()
            if parent.reads in ready:
                self._receive_from_parent(awake)
            elif (limit := parent.exceeded_silence(awake)) is not None:
                text = f"the launcher has not answered for {limit:g} s"
                self._handle(events.ParentLost(text=text))
            for thread in threads:
                if thread.reads in ready:
                    thread.handle_results()
            if self._interrupted:
                self._handle(lines.Interrupt())
            if now >= next_tick and all_received:
                next_tick = now + self._timings.tick
                self._handle(events.Tick(clock.suspended - suspended))
                suspended = clock.suspended
                self._workers.ping_quiet(set(self._job.peers))
                if self._run_dir.withdraw(Request.CHECKPOINT):
                    self._handle(lines.SaveRequest())
                if self._run_dir.requested(Request.CANCEL):
                    self._handle(lines.Interrupt())
                self._show(now)
            if now >= next_ping:
                next_ping = now + self._timings.ping
                self._ping_all()
                parent.send(lines.KeepAlive(self._options.worker_timeout))
        self._deliver_last()
        self._run_dir.withdraw(Request.WATCH)  # one that came with the end of the job
        self._files.close()
        parent.drain()
        workers = self._workers
        log.info("control messages: %d received, %d sent", workers.received, workers.sent)
        return self._verdict.exit_status

    def _show(self, now: float) -> None:
        """Write what the workers do at present, while somebody watches."""
        if self._run_dir.withdraw(Request.WATCH):
            self._watched_until = now + _WATCHED
        if self._next_look <= now < self._watched_until:
            self._next_look = now + _LOOK
            self._files.write_now(self._job.now(now))

    def _on_signal(self, number: int, frame: object) -> None:
        self._interrupted = True

    def _handle(self, event: events.Event) -> None:
        """Handle an event and perform its effects.

        The first one may be the line of a snapshot, so the job learns before whether the parent
        reads it.
        """
        if self._parent.has_room is not self._parent_reads:
            self._parent_reads = not self._parent_reads
            self._handle(events.ParentReads(self._parent_reads))
        for effect in self._job.handle(event, time.monotonic()):
            self._perform(effect)

    def _receive(self) -> bool:
        """Handle messages for at most the time `burst`; return whether none is left.

        Only then is a worker's silence significant.
        """
        for event in self._workers.events(time.monotonic() + self._timings.burst):
            self._handle(event)
        return self._workers.all_read

    def _ping_all(self) -> None:
        self._workers.ping(set(self._job.peers))

    def _deliver_last(self) -> None:
        """Wait for at most the time `linger` until workers know that the job has ended.

        Otherwise they would report the coordinator's exit as its loss.
        """
        assert self._job.end
        done = self._job.end.status is Status.DONE
        until = time.monotonic() + self._timings.linger
        while self._workers.has_unacknowledged if done else self._job.awaits_late_workers:
            if time.monotonic() > until:
                return
            if done:
                self._ping_all()
            if self._workers.wait(self._timings.tick):
                self._receive()

    def _receive_from_parent(self, now: float) -> None:
        """Handle the parent's events, and its end."""
        for event in self._parent.receive(now):
            self._handle(event)
        if self._parent.gone:
            self._handle(events.ParentLost(self._configuration.parent_rank))

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Send():
                self._workers.send(effect)
            case effects.Log():
                log.info("%s", effect.text)
            case effects.Dropped():
                self._workers.log_dropped(effect.text)
            case Joined() | Planned() | Restart() | Snapshot() | Activity():
                self._parent.send(effect)
            case lines.Warned():
                self._files.warn(effect.text, note=effect.note)
            case effects.WritePlan():
                # The earlier workers have ended, and the new ones do not save yet.
                self._files.remove_unfinished()
                self._files.write_plan(effect.content)
            case StepResult():
                self._files.add_step(effect)
                self._parent.send(effect)
            case Evaluation():
                self._files.add_evaluation(effect)
                self._parent.send(effect)
            case effects.KeepFacts():
                self._cache.add(effect.facts)
            case effects.MakePlan():
                self._planner.submit(partial(make_plan, effect), self._handle)
            case effects.Commit():
                self._files.commit(effect, self._job.placement.stages)
            case effects.Withdraw():
                self._files.withdraw_step(effect.step)
            case effects.Discard():
                self._files.discard(effect.step)
            case lines.Verdict():
                self._files.write_summary(effect, self._job.placement.stages, self._end)
            case _:
                assert_never(effect)

    def _end(self, verdict: lines.Verdict) -> None:
        self._verdict = verdict
        self._parent.send(verdict)


def make_plan(request: effects.MakePlan) -> events.PlanMade:
    """Return the plan that was requested, or why there is none."""
    try:
        return events.PlanMade(request.generation, plan_job(request.facts, request.options))
    except UsageError as error:
        return events.PlanMade(request.generation, None, str(error))
    except Exception:
        log.exception("the plan cannot be made")
        text = "the plan cannot be made: see logs/coordinator.log; give --balance and --recompute"
        return events.PlanMade(request.generation, None, text)


def check_room(options: Options) -> None:
    """Raise PipeworkerError if the system does not grant the sockets of all workers."""
    needs = (sockets.SERVER_NEEDS, result_thread.NEEDS, result_thread.NEEDS)
    descriptors, threads = map(sum, zip(*needs, strict=True))
    try:
        check_tasks(threads, "the coordinator needs")
        check_available(descriptors + options.workers, threads)
    except OSError as error:
        raise PipeworkerError(f"cannot start the coordinator: {error.strerror}") from None


def main() -> int:
    """Run the job that the configuration on standard input describes; return the exit status."""
    signal_with_parent(signal.SIGCONT)  # a stopped coordinator would not see its input end
    line = io.FileIO(0, closefd=False).readline()  # unbuffered: later lines are left in the pipe
    if not line.endswith(b"\n"):
        return 1
    configuration = lines.decode(line)
    assert isinstance(configuration, lines.Configuration)
    descriptors, parent = DescriptorReserve(), ParentProcess()
    host = configuration.host
    log.addHandler(logging.NullHandler())  # until there is a log, nothing is logged to the terminal
    try:
        run_dir = RunDir.open(Path(configuration.run_dir))
        log_file = LogFile(run_dir.coordinator_log, parent)
        logging.basicConfig(level=logging.INFO, handlers=[log_file])
        check_room(Options.from_json(configuration.options))
        server = sockets.server(configuration.token, host, timings())
        with RunLock(run_dir.lock, exclusive=False), server as (socket, endpoint):
            log.info("bound to %s", endpoint)
            return Service(configuration, socket, descriptors, parent, run_dir).run(endpoint)
    except (PipeworkerError, OSError, zmq.ZMQError) as error:  # the coordinator cannot run
        log.exception("the coordinator failed")
        text = located(error)
        if isinstance(error, OSError):
            text = record_error(error.filename or configuration.run_dir, error)
        elif isinstance(error, zmq.ZMQError):
            where = f"{host} ({platform.node()})"
            text = f"the coordinator cannot listen at {where}: {error.strerror}"
        verdict = lines.Verdict("failed", 1, 0, 0.0, (), 0.0, text, configuration.causes)
        if not isinstance(error, BlockingIOError):  # the lock: the run is another job's
            verdict = _record_failure(configuration, verdict, descriptors)
        parent.send(verdict)
        parent.drain()
        return 1
    except Exception:
        log.exception("the coordinator failed")
        raise


def _record_failure(
    configuration: lines.Configuration, verdict: lines.Verdict, descriptors: DescriptorReserve
) -> lines.Verdict:
    """Write the summary of a job whose coordinator cannot run; return its verdict.

    Without a summary, the run would count as one whose processes were killed. The error that the
    verdict has matters more than one in writing the summary.
    """
    options = Options.from_json(configuration.options)
    with suppress(OSError, PipeworkerError):
        run_dir = RunDir.open(Path(configuration.run_dir))
        steps = (rows.last(run_dir.metrics) or {}).get("step", 0)
        verdict = replace(verdict, steps=steps, seconds=configuration.elapsed)
        stages = options.placement.stages
        descriptors.run(partial(write_summary, run_dir, verdict, stages, options.best))
    return verdict


def recorded_facts(run_dir: RunDir) -> NetworkFacts | None:
    """Return the facts that a run was planned from, which its plan records; None without any."""
    try:
        return PlanFile.read(run_dir).facts
    except (OSError, UnreadableFile) as error:
        log.info("no facts of the run's layers are recorded: %s", error)
        return None


def read_start(configuration: Configuration, options: Options, run_dir: RunDir) -> Start:
    """Return the state left by an earlier coordinator or a checkpoint; for a new job, the initial.

    Raises:
        UsageError: the checkpoint cannot be read.
        OSError: the system does not let it be read.
    """
    causes = configuration.causes
    start = Start(causes=causes, elapsed=configuration.elapsed, stages=configuration.stages)
    if causes:  # an earlier coordinator may have been killed while it replaced a checkpoint
        run_dir.checkpoints.restore_replaced()
    saved = run_dir.checkpoints.last_step() if causes else -1
    path = options.resume and located(run_dir.checkpoints.at(options.resume_step))
    if saved > options.resume_step:  # the one that the run began with may be deleted by now
        path = located(run_dir.checkpoints.at(saved))
    if path:
        found = Manifest.read(Path(path) / MANIFEST)
        fp16, step = options.precision == "fp16", found.step
        scaler = LossScaler(**found.scaler) if found.scaler and fp16 else None
        row = found.evaluation
        evaluation = None if row is None else Evaluation.of({"step": step, **row})
        state = JobState(step, scaler, evaluation, found.epoch, found.evaluation_due)
        on_disk = state, Restore(step, path)
        start = replace(
            start, on_disk=on_disk, layers=found.layers.prefixes, recorded=step, saved=step
        )
    evaluations = {row["step"]: Evaluation.of(row) for row in rows.read(run_dir.evaluation)}
    checkpoints = frozenset(run_dir.checkpoints.steps())
    start = replace(start, evaluations=(*evaluations.values(),), checkpoints=checkpoints)
    if not causes:
        return start
    recorded = int((rows.last(run_dir.metrics) or {}).get("step", 0))
    snapshot = configuration.snapshot
    last = None
    if snapshot and snapshot.step <= recorded:  # rows may have waited for room on a disk
        scaler = LossScaler(snapshot.scale, snapshot.good_steps) if snapshot.scale else None
        restore = Restore(snapshot.step, slot=snapshot.slot, ranks=snapshot.ranks)
        last = JobState(snapshot.step, scaler, evaluations.get(snapshot.step)), restore
    return replace(start, snapshot=last, recorded=recorded, saved=saved)
