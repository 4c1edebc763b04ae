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

NOTICE = 120
"""Seconds before the end of its time limit at which a job is notified."""
POLL_SECONDS = 1.0
_CALLER = "SLURM_LAUNCH_NODE_IPADDR"
"""The variable in which srun passes on the address of the host that called it."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_SCRIPT = """\
#!/bin/bash
{directives}

# A notice (USR1 before the time limit, TERM to the agents at a preemption) stops the run with a
# checkpoint; the requeued job resumes it. INT stops the run for good.
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
if [ $status -eq 130 ] && [ $requeue = yes ] && [ "$state" = RUNNING ]; then
    scontrol requeue $SLURM_JOB_ID
fi
exit $status
"""
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
    """A submitted job: its number, and the file to which its output goes."""

    job: str
    log: Path

    def follow(self) -> int:
        """Show the job's output, or why it waits, until it ends; return its exit status."""
        shown, waits_for = 0, ""
        while True:
            found = self.state()
            shown = self._show(shown)
            if found.state in _WAITING and found.reason not in ("", waits_for):
                waits_for = found.reason
                click.echo(f"job {self.job} waits: {waits_for}", err=True)
            if found.state not in (*_WAITING, *_RUNNING):
                break
            time.sleep(POLL_SECONDS)
        if found.state == "COMPLETED":
            return 0
        if not found.status:
            reason = found.reason or found.state or "Slurm does not know it"
            click.echo(f"error: job {self.job}: {reason}", err=True)
        return found.status or 1

    def cancel(self) -> None:
        """End the job after its step, with a checkpoint; at once if it does not run yet."""
        if self.state().state in _WAITING:
            _run("scancel", self.job)
        else:
            _run("scancel", "--batch", "--signal=INT", self.job)
        click.echo(
            f"job {self.job} saves a checkpoint and ends; interrupt again to stop waiting for it",
            err=True,
        )

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
        if not self.log.exists():
            return start
        with self.log.open("rb") as file:
            file.seek(start)
            data = file.read()
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()
        return start + len(data)


class Slurm(Cluster):
    name = "slurm"

    def render(self, spec: JobSpec) -> str:
        """Return the script of a job, whose settings are long options of sbatch and override ours.

        Raises:
            UsageError: a setting is not an option.
        """
        directives = {
            "job-name": spec.name,
            "nodes": str(spec.nodes),
            "ntasks-per-node": "1",
            "cpus-per-task": str(spec.cores_per_node),
            "chdir": spec.folder,
            "output": _log(spec),
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
        launch = [spec.python, "-m", "pipeworker", "launch", "--stages", str(spec.stages)]
        line = shlex.join([*launch, *spec.words(spec.job_file)])
        return _SCRIPT.format(directives="\n".join(lines), command=line)

    def submit(self, spec: JobSpec) -> SlurmJob:
        """Submit the script of a job.

        Raises:
            UsageError: Slurm is not installed here, or rejects the script.
        """
        script, log = self.render(spec), Path(_log(spec))
        log.parent.mkdir(parents=True, exist_ok=True)  # Slurm drops the output otherwise
        try:
            answer = _run("sbatch", "--parsable", text=script)
        except PipeworkerError as error:
            raise UsageError(str(error)) from None
        job = SlurmJob(answer.strip().partition(";")[0], log)
        click.echo(f"job {job.job} is submitted; its output goes to {log}", err=True)
        return job


class SlurmAllocation(Carrier):
    """The nodes of the job inside which this process runs."""

    name = "an allocation of Slurm's"

    def is_inside(self, environment: Mapping[str, str]) -> bool:
        """Return whether this process has an allocation, and is not a job step inside it."""
        return "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment

    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        return agents(spec, allocated_nodes(os.environ))


def _log(spec: JobSpec) -> str:
    return f"{spec.run_dir}.log"


def allocated_nodes(environment: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return the nodes of this process's allocation, each with its number of cores.

    Raises:
        UsageError: the environment describes it incompletely.
    """
    try:
        listed = environment["SLURM_JOB_NODELIST"]
        cores = parse_counts(environment["SLURM_JOB_CPUS_PER_NODE"])
    except KeyError as error:
        raise UsageError(f"Slurm's environment: {error} is not set") from None
    nodes = _run("scontrol", "show", "hostnames", listed).split()
    if len(nodes) != len(cores):
        raise UsageError(f"Slurm's environment: {len(nodes)} nodes, but {len(cores)} counts")
    return tuple(zip(nodes, cores, strict=True))


def agents(spec: JobSpec, nodes: Sequence[tuple[str, int]]) -> tuple[RemoteAgent, ...]:
    """Return the agents of nodes with so many cores; workers are spread evenly.

    Raises:
        UsageError: there are more nodes than workers.
    """
    if len(nodes) > spec.workers:
        raise UsageError(
            f"--stages: the allocation has {len(nodes)} nodes, and the job {spec.workers} workers; "
            "use at least one worker a node"
        )
    share, more = divmod(spec.workers, len(nodes))
    found = []
    for number, (node, cores) in enumerate(nodes):
        step = ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap")
        how = (f"--cpus-per-task={cores}", "--cpu-bind=none", "--quiet", f"--chdir={spec.folder}")
        host = Host(node, share + (number < more))
        found.append(RemoteAgent(host, (*step, *how, *agent_command(spec, _CALLER))))
    return tuple(found)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse a list of numbers as Slurm abbreviates it: ``4(x2),3`` is 4, 4, 3.

    Raises:
        UsageError: the text is something else.
    """
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
