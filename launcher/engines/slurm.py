"""Slurm: a script for sbatch, the job that it becomes, and the allocation inside that job.

The script runs ``pipeworker launch`` on the first node, which finds the allocation and starts an
agent on every node: each is a job step, whose pipes srun carries.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from launcher.engines.engine import Carrier, Cluster, agent_command, run_client
from launcher.spec import Host, JobSpec, RemoteAgent
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.plan.figures import plural
from pipeworker.plan.partition import sizes
from pipeworker.record.rundir import Request

NOTICE = 120
"""Seconds before the end of its time limit at which a job is notified."""
POLL_SECONDS = 1.0
MOST_SECONDS = 60.0
"""Between two questions to a controller that does not answer."""
_CALLER = "SLURM_LAUNCH_NODE_IPADDR"
"""The variable in which srun passes on the address of the host that called it."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
"""A time limit: minutes, minutes:seconds, hours:minutes:seconds, or behind days and a hyphen."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_SCRIPT = """\
#!/bin/bash
{directives}

# A notice (USR1 before the time limit, TERM to the agents at a preemption) stops the run with a
# checkpoint; the requeued job resumes it. INT stops the run for good, and so does a cancel.
{again}
# sbatch exports these from a shell that srun has started; this script is no job step.
unset SLURM_STEP_ID SLURM_STEP_NUM_TASKS
{command} &
run=$!
requeue=yes
trap 'kill -TERM $run' USR1
trap 'requeue=no; kill -TERM $run' INT
trap : TERM
wait $run
status=$?
while kill -0 $run 2> /dev/null; do
    wait $run
    status=$?
done
state=$(squeue --noheader --job $SLURM_JOB_ID --format %T)
if [ -e {cancelled} ]; then requeue=no; fi
if [ $status -eq 130 ] && [ $requeue = yes ] && [ "$state" = RUNNING ]; then
    scontrol requeue $SLURM_JOB_ID
fi
exit $status
"""
_AGAIN = """\
# After the first start, the run directory holds this job's run.
set --
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then set -- --auto-resume; fi"""
_ONE_TASK = (
    "each node has one job step of one task, which would not get the GPUs of the node; use "
    "--gpus-per-node"
)
_ALONE = "unset SLURM_JOB_ID to run on this host alone"
_INTERACTIVE_STEP = "4294967290"
"""The number of the step in which salloc may run its shell: no step of the user's."""
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STOPPED", "RESIZING", "STAGE_OUT")
_UNKNOWN = "Invalid job id"


@dataclass(frozen=True, slots=True)
class State:
    """The state of a job, its reason if there is one, and at its end its exit status."""

    state: str = ""
    reason: str = ""
    status: int = 0


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A submitted job.

    Attributes:
        job: its number.
        log: the file to which its output goes; None if Slurm alone knows it.
        start: the size of the file when the job was submitted.
    """

    job: str
    log: Path | None
    start: int = 0

    def follow(self) -> int:
        """Show the job's output, or why it waits, until it ends; return its exit status.

        Slurm may not answer for a while: the job runs meanwhile.
        """
        shown, waits_for, pause = self.start, "", 0.0
        while True:
            shown = self._show(shown)
            try:
                found = self.state()
            except PipeworkerError as error:
                if not pause:
                    click.echo(f"job {self.job} goes on, but {error}; asking again", err=True)
                pause = min(2 * pause or 2 * POLL_SECONDS, MOST_SECONDS)
                time.sleep(pause)
                continue
            if pause:
                click.echo(f"job {self.job}: Slurm answers again", err=True)
                pause = 0.0
            if found.state in _WAITING and found.reason not in ("", waits_for):
                waits_for = found.reason
                click.echo(f"job {self.job} waits: {waits_for}", err=True)
            if found.state not in (*_WAITING, *_RUNNING):
                break
            time.sleep(POLL_SECONDS)
        self._show(shown)
        if found.state == "COMPLETED":
            return 0
        if not found.status:
            reason = found.reason or found.state or "Slurm does not know it"
            click.echo(f"error: job {self.job}: {reason}", err=True)
        return found.status or 1

    def cancel(self) -> str:
        """End the job after its step, with a checkpoint; at once if it does not run yet."""
        how = () if self.state().state in _WAITING else ("--batch", "--signal=INT")
        _run("scancel", *how, self.job)
        return f"job {self.job} of Slurm is cancelled"

    def state(self) -> State:
        """Return the job's state; Slurm forgets a job some minutes after its end."""
        try:
            answer = _run("scontrol", "--oneliner", "show", "job", self.job)
        except PipeworkerError as error:
            if _UNKNOWN in str(error):
                return State()
            raise
        fields = dict(re.findall(r"(?:^| )(JobState|ExitCode|Reason)=(\S+)", answer))
        reason = "" if fields["Reason"] == "None" else fields["Reason"]
        return State(fields["JobState"], reason, int(fields["ExitCode"].partition(":")[0]))

    def _show(self, start: int) -> int:
        """Show the log from an offset on; return the next offset."""
        if self.log is None or not self.log.exists():
            return start
        with self.log.open("rb") as file:
            file.seek(start)
            data = file.read()
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()
        return start + len(data)


class Slurm(Cluster):
    def render(self, spec: JobSpec) -> str:
        """Return the script of a job; its settings are long options of sbatch and override ours."""
        if "array" in spec.settings:
            raise UsageError(
                "--set array: its jobs would share a run directory; submit each by itself, with a "
                "--run-dir of its own"
            )
        if "gpus" in spec.settings and spec.nodes > 1:
            raise UsageError(f"--set gpus: {_ONE_TASK}")
        directives = {
            "job-name": spec.name,
            "nodes": str(spec.nodes),
            "ntasks-per-node": "1",
            "cpus-per-task": str(spec.cores_per_node),
            "chdir": spec.folder,
            "output": _log(spec),
            "comment": spec.run_dir,
            "open-mode": "append",
            "requeue": "",
            "signal": f"B:USR1@{NOTICE}",
        }
        for name, value in spec.settings.items():
            if not _OPTION.fullmatch(name) or "\n" in value:
                raise UsageError(f"--set {name}={value}: must be a long option of sbatch")
            directives[name] = value
        lines = [
            f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
            for name, value in directives.items()
        ]
        start = shlex.join([spec.python, "-m", "pipeworker", "launch"])
        words = shlex.join(["--stages", str(spec.stages), *spec.words(spec.job_file)])
        again = "set -- --auto-resume" if spec.auto_resume else _AGAIN
        again = "set --" if "--resume" in spec.options else again
        line = f'{start} "$@" {words}'
        return _SCRIPT.format(
            directives="\n".join(lines),
            again=again,
            command=line,
            cancelled=shlex.quote(f"{spec.run_dir}/{Request.CANCEL.value}"),
        )

    def submit(self, spec: JobSpec) -> SlurmJob:
        """Submit the script of a job."""
        script, pattern = self.render(spec), spec.settings.get("output", _log(spec))
        parent = Path(spec.settings.get("chdir", spec.folder), pattern).parent
        if "%" not in str(parent).replace("%%", ""):
            plain = Path(str(parent).replace("%%", "%"))
            plain.mkdir(parents=True, exist_ok=True)  # Slurm drops the output otherwise
        early = _log_file(spec, pattern, "")
        start = early.stat().st_size if early and early.exists() else 0
        try:
            answer = _run("sbatch", "--parsable", text=script)
        except PipeworkerError as error:
            raise UsageError(str(error)) from None
        number = answer.strip().partition(";")[0]
        log = _log_file(spec, pattern, number)
        shown = log or f"{pattern}, which cannot be followed"
        click.echo(f"job {number} is submitted; its output goes to {shown}", err=True)
        limit = time_limit(spec.settings.get("time", ""))
        if limit is not None and limit <= NOTICE and "signal" not in spec.settings:
            click.echo(
                f"warning: the time limit is {limit} s, and the job is notified {NOTICE} s before "
                "it: it would save a checkpoint and be put back into the queue at once; give more "
                "--set time, or --set signal=B:USR1@SECONDS",
                err=True,
            )
        return SlurmJob(number, log, start)


class SlurmAllocation(Carrier):
    """The nodes of the job inside which this process runs."""

    def is_inside(self, environment: Mapping[str, str]) -> bool:
        """Return whether this process has an allocation, and is not a job step inside it."""
        step = environment.get("SLURM_STEP_ID", _INTERACTIVE_STEP)
        return "SLURM_JOB_ID" in environment and step == _INTERACTIVE_STEP

    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        return agents(spec, allocated_nodes(os.environ))


def find(run: str) -> SlurmJob | None:
    """Return the job of this user that was submitted for a run directory, and has not ended.

    Raises:
        PipeworkerError: Slurm does not answer.
    """
    for line in _run("squeue", "--me", "--noheader", "--format", "%i %k").splitlines():
        number, _, comment = line.partition(" ")
        if comment.strip() == str(Path(run).absolute()):
            return SlurmJob(number, None)
    return None


def _log(spec: JobSpec) -> str:
    return f"{spec.run_dir.replace('%', '%%')}.log"


def _log_file(spec: JobSpec, pattern: str, number: str) -> Path | None:
    """Return the file that a pattern of sbatch names; None if that depends on more than the job.

    Without the job's number, it is the file that all jobs of this pattern have.
    """
    known = {"x": spec.settings.get("job-name", spec.name), "%": "%"}
    if number:
        known |= {"j": number, "A": number}
    if {*re.findall(r"%(.)", pattern)} - known.keys():
        return None
    name = re.sub(r"%(.)", lambda found: known[found[1]], pattern)
    return Path(spec.settings.get("chdir", spec.folder), name)


def time_limit(text: str) -> int | None:
    """Return the seconds of a time limit as sbatch takes it; None if it is something else.

    A limit of zero is none.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *parts = match.groups()
    first, second, third = (int(part or 0) for part in parts)
    if days is None and parts[2] is None:
        return 60 * first + second or None
    return 86400 * int(days or 0) + 3600 * first + 60 * second + third or None


def check_job_step(environment: Mapping[str, str]) -> None:
    """Raise UsageError if srun started a launcher for each task, or Slurm several allocations."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks != "1":
        raise UsageError(
            f"srun starts this command {tasks} times, each a job of its own: write `pipeworker "
            "launch` without srun, and it starts a job step on each node"
        )
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise UsageError(
            "a heterogeneous job of Slurm has several allocations, and pipeworker uses one: submit "
            "a job without components"
        )


def allocated_nodes(environment: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return the nodes of this process's allocation, each with its number of cores."""
    try:
        listed = environment["SLURM_JOB_NODELIST"]
        cores = parse_counts(environment["SLURM_JOB_CPUS_PER_NODE"])
    except KeyError as error:
        raise UsageError(f"Slurm's environment: {error} is not set; {_ALONE}") from None
    try:
        nodes = _run("scontrol", "show", "hostnames", listed).split()
    except PipeworkerError as error:  # as in a container without Slurm's commands
        raise PipeworkerError(f"{error}; {_ALONE}") from None
    if len(nodes) != len(cores):
        raise UsageError(f"Slurm's environment: {len(nodes)} nodes, but {len(cores)} counts")
    tasks = parse_counts(environment.get("SLURM_TASKS_PER_NODE", "1"))
    for name, count in (("SLURM_GPUS", len(nodes)), ("SLURM_GPUS_PER_TASK", max(tasks))):
        if name in environment and count > 1:
            raise UsageError(f"{name}={environment[name]}: {_ONE_TASK}")
    return tuple(zip(nodes, cores, strict=True))


def agents(spec: JobSpec, nodes: Sequence[tuple[str, int]]) -> tuple[RemoteAgent, ...]:
    """Return the agents of nodes with so many cores; workers are spread evenly."""
    if len(nodes) > spec.workers:
        raise UsageError(
            f"--stages: the allocation has {len(nodes)} nodes, and the job "
            f"{plural(spec.workers, 'worker')}; use at least one worker a node"
        )
    found = []
    for (node, cores), workers in zip(nodes, sizes(spec.workers, len(nodes)), strict=True):
        step = ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap")
        how = (f"--cpus-per-task={cores}", "--cpu-bind=none", "--quiet", f"--chdir={spec.folder}")
        environment = "--export=ALL"  # this one's, also in a job with --export=NONE
        ours = ("env", f"{_CALLER}={spec.launcher_address}") if spec.launcher_address else ()
        line = (*step, *how, environment, *ours, *agent_command(spec, _CALLER))
        found.append(RemoteAgent(Host(node, workers), line))
    return tuple(found)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse a list of numbers as Slurm abbreviates it: ``4(x2),3`` is 4, 4, 3."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"Slurm's environment: {text!r} is not a list of numbers")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _run(*words: str, text: str = "") -> str:
    try:
        return run_client(words, text, label=words[0], cluster="Slurm")
    except OSError as error:
        raise PipeworkerError(f"Slurm's command {words[0]}: {error.strerror}") from None
