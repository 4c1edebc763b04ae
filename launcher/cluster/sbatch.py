"""Acts on Slurm, through its commands: submits a script, follows the job, ends it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.slurm import Allocation, Script, of_counts
from launcher.spec import Condition
from pipeworker.errors import PipeworkerError, UsageError

_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_STATES = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting",
    "CONFIGURING": "waiting",
    "SUSPENDED": "waiting",
    "COMPLETED": "done",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SIGNALING": "running",
    "STOPPED": "running",
    "RESIZING": "running",
    "STAGE_OUT": "running",
}
"""All others are failures."""
_GONE = "Invalid job id"


@dataclass(frozen=True, slots=True)
class Sbatch:
    """A job of Slurm's.

    Attributes:
        job: its number.
        log: where its output goes.
    """

    job: str
    log: Path

    @staticmethod
    def submit(script: Script) -> Sbatch:
        """Hand a script in.

        Raises:
            UsageError: there is no Slurm here, or it refuses.
        """
        log = Path(script.log)
        log.parent.mkdir(parents=True, exist_ok=True)  # or else Slurm drops what is said
        try:
            said = _run("sbatch", "--parsable", said=script.script)
        except PipeworkerError as error:
            raise UsageError(str(error)) from None
        return Sbatch(said.strip().partition(";")[0], log)

    def status(self) -> Condition:
        """How the job is now; Slurm forgets one some minutes after its end."""
        try:
            said = _run("scontrol", "--oneliner", "show", "job", self.job)
        except PipeworkerError as error:
            if _GONE in str(error):
                return Condition("absent")
            raise
        fields = dict(re.findall(r"(?:^| )(JobState|ExitCode|Reason)=(\S+)", said))
        state = _STATES.get(fields["JobState"], "failed")
        status = int(fields["ExitCode"].partition(":")[0])
        why = fields["JobState"] if fields["Reason"] == "None" else fields["Reason"]
        return Condition(state, why, status)

    def logs(self) -> str:
        """What the job has said so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def cancel(self) -> None:
        """End the job behind its step, with a checkpoint; at once where it does not run yet."""
        if self.status().state == "waiting":
            _run("scancel", self.job)
        else:
            _run("scancel", "--batch", "--signal=INT", self.job)

    def follow(self) -> int:
        """Show what the job says, or why it waits, until it ends; returns its exit status."""
        at, waits = 0, ""
        while True:
            found = self.status()
            at = self._show(at)
            if found.state == "waiting" and found.why not in (waits, *_STATES):
                waits = found.why
                print(f"job {self.job} waits: {waits}", file=sys.stderr, flush=True)
            if found.state not in ("waiting", "running"):
                break
            time.sleep(_LOOK_SECONDS)
        if found.state == "done":
            return 0
        if not found.status:
            print(f"error: job {self.job}: {found.why or found.state}", file=sys.stderr)
        return found.status or 1

    def _show(self, at: int) -> int:
        if not self.log.exists():
            return at
        with self.log.open("rb") as file:
            file.seek(at)
            data = file.read()
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()
        return at + len(data)


def allocation(environment: Mapping[str, str]) -> Allocation:
    """That of this process.

    Raises:
        UsageError: the environment does not say all of it.
        PipeworkerError: Slurm does not answer.
    """
    try:
        listed = environment["SLURM_JOB_NODELIST"]
        cores = of_counts(environment["SLURM_JOB_CPUS_PER_NODE"])
    except KeyError as error:
        raise UsageError(f"Slurm's environment is not whole: {error} is not set") from None
    nodes = tuple(_run("scontrol", "show", "hostnames", listed).split())
    if len(nodes) != len(cores):
        raise UsageError(f"Slurm's environment is wrong: {len(nodes)} nodes, {len(cores)} counts")
    return Allocation(nodes, cores)


def _run(*words: str, said: str | None = None) -> str:
    """What a command of Slurm's answers.

    Raises:
        PipeworkerError: it is not there, refuses, or does not answer.
    """
    try:
        ran = subprocess.run(
            words,
            input=said,
            stdin=None if said is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise PipeworkerError(f"Slurm's command {words[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PipeworkerError(f"{words[0]}: Slurm has not answered for {_SECONDS:g} s") from None
    if ran.returncode:
        why = ran.stderr.strip().removeprefix(f"{words[0]}: ") or f"status {ran.returncode}"
        raise PipeworkerError(f"{words[0]}: {why}")
    return ran.stdout
