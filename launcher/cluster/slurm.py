"""Slurm: a script for sbatch, and what happens inside of an allocation.

The script runs `pipeworker launch` on the first node. There it finds the allocation by itself and
starts an agent on every node, each a job step whose pipes srun carries.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.spec import Carried, Host, JobSpec, shell
from pipeworker.errors import UsageError
from pipeworker.host.spawn import command

NOTICE = 120
"""Seconds before the end of its time at which a job is told."""
_CALLER = "SLURM_LAUNCH_NODE_IPADDR"
"""What srun says to its tasks: the address of who called it."""
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_SCRIPT = """\
#!/bin/bash
{directives}

# A notice (USR1 before the end of its time, TERM to the agents at a preemption) stops the run with
# a checkpoint, and it goes on from there when the job is started again. INT stops it for good.
{command} &
run=$!
again=yes
trap 'kill -TERM $run' USR1
trap 'again=no; kill -TERM $run' INT
trap : TERM
wait $run
status=$?
while kill -0 $run 2> /dev/null; do
    wait $run
    status=$?
done
state=$(squeue --noheader --job $SLURM_JOB_ID --format %T)
if [ $status -eq 130 ] && [ $again = yes ] && [ "$state" = RUNNING ]; then
    scontrol requeue $SLURM_JOB_ID
fi
exit $status
"""


@dataclass(frozen=True, slots=True)
class Script:
    """What sbatch is given, and where its output goes."""

    script: str
    log: str

    def text(self) -> str:
        return self.script


def render(spec: JobSpec, python: str) -> Script:
    """The script of a job.

    Args:
        spec: with a run directory; its settings are long options of sbatch, as ``partition=gpu``,
            and go before ours. One without a value is a flag.
        python: the interpreter that runs it, absolute.

    Raises:
        UsageError: a setting is no option.
    """
    log = f"{spec.run_dir}.log"
    directives = {
        "job-name": spec.name,
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cores_per_node),
        "chdir": spec.folder,
        "output": log,
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{NOTICE}",
    }
    for name, value in spec.settings.items():
        if not _NAME.fullmatch(name) or "\n" in value:
            raise UsageError(f"--set {name}={value}: must be a long option of sbatch")
        directives[name] = value
    lines = [
        f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
        for name, value in directives.items()
    ]
    words = spec.command(python, "-m", "pipeworker", "launch", "--stages", str(spec.stages))
    asked = shell(words[: 6 + len(spec.words)])
    rest = shell(words[6 + len(spec.words) :])
    line = f"{asked} --run-dir {shlex.quote(spec.run_dir)} --go-on {rest}"
    return Script(_SCRIPT.format(directives="\n".join(lines), command=line), log)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes that a job has, with their cores."""

    nodes: tuple[str, ...]
    cores: tuple[int, ...]


def of_counts(text: str) -> tuple[int, ...]:
    """Read a list as Slurm shortens it: ``4(x2),3`` is 4, 4, 3.

    Raises:
        UsageError: it is not one.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"Slurm's environment is wrong: {text!r} is no list of numbers")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def is_inside(environment: Mapping[str, str]) -> bool:
    """Whether this process has an allocation, and is not a task that srun has started in it."""
    return "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment


def carried(spec: JobSpec, allocation: Allocation) -> tuple[Carried, ...]:
    """The agents of an allocation's nodes, as commands; workers are spread evenly.

    Raises:
        UsageError: there are more nodes than workers.
    """
    count = len(allocation.nodes)
    if count > spec.workers:
        raise UsageError(f"the allocation has {count} nodes, and the job {spec.workers} workers")
    share, more = divmod(spec.workers, count)
    module, run = "pipeworker.host.forkserver", str(Path(spec.run_dir) / "run.json")
    agent = command(module, "", spec.job_file, run, _CALLER)
    found = []
    for number, (node, cores) in enumerate(zip(allocation.nodes, allocation.cores, strict=True)):
        step = ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap")
        how = (f"--cpus-per-task={cores}", "--cpu-bind=none", "--quiet", f"--chdir={spec.folder}")
        host = Host(node, share + (number < more))
        found.append(Carried(host, (*step, *how, *agent)))
    return tuple(found)
