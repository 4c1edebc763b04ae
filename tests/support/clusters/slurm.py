"""A real Slurm on this machine: a controller, and nodes that are processes."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.processes.ports import reserve_port
from support.real_jobs.jobs import until

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_BROKERS = "/usr/sbin:/usr/local/sbin"
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=8
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=8
PartitionName=low Nodes=n1,n2 Default=YES State=UP PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE
PartitionName=high Nodes=n1,n2 State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs; its commands need `environment`."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        env = {**os.environ, **self.environment}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """End the controller, and start it again afterwards."""
        before = self.daemons["slurmctld"]
        before.terminate()
        before.wait()
        yield
        line, env = [*before.args], {**os.environ, **self.environment}  # type: ignore[misc]
        self.daemons["slurmctld"] = subprocess.Popen(line, cwd="/", env=env, stderr=-3)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a Slurm of two nodes; skip the test without Slurm or root."""
    path = f"{os.environ['PATH']}:{_BROKERS}"
    found = {name: shutil.which(name, path=path) for name in _PROGRAMS}
    if missing := [name for name, where in found.items() if where is None]:
        pytest.skip(f"Slurm is not installed: {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("Slurm's daemons need root")
    munge = folder / "munge"
    munge.mkdir(mode=0o700)
    (folder / "state").mkdir()
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    made = Slurm(folder)

    def start(name: str, *words: str) -> None:
        line = [str(found[name]), *words]
        with (folder / f"{name}.out").open("ab") as out:
            env = {**os.environ, **made.environment}
            process = subprocess.Popen(line, cwd="/", env=env, stdout=out, stderr=out)
            made.daemons[" ".join([name, *words[1:3]]) if name == "slurmd" else name] = process

    def idle_nodes() -> str:
        words = ("sinfo", "--noheader", "--partition", "low", "--states", "idle", "-o", "%D")
        return _output(made, *words).strip()

    def outputs() -> str:
        return "\n".join(f"{out.name}: {out.read_text()}" for out in sorted(folder.glob("*.out")))

    files = {"socket": "socket", "key-file": "key", "log-file": "log", "seed-file": "seed"}
    where = [f"--{option}={munge / name}" for option, name in files.items()]
    with ExitStack() as reserved:
        ports = {name: reserve_port(reserved) for name in ("controller", "first", "second")}
        configuration.write_text(_CONFIGURATION.format(folder=folder, **ports))
        try:
            start("munged", "--foreground", "--force", f"--pid-file={munge / 'pid'}", *where)
            until((munge / "socket").exists, explain=outputs)
            start("slurmctld", "-D", "-f", str(configuration))
            for node in NODES:
                start("slurmd", "-D", "-N", node, "-f", str(configuration))
            until(lambda: idle_nodes() == str(len(NODES)), pause=0.2, explain=outputs)
            yield made
        finally:
            _output(made, "scancel", "--full", "--user", "root")
            jobs = ("squeue", "--noheader", "--states", "running,completing")
            until(lambda: not _output(made, *jobs), pause=0.2, explain=outputs)
            for process in reversed(made.daemons.values()):
                process.terminate()
                process.wait()


def _output(made: Slurm, *words: str) -> str:
    """Return the output of a command while the controller may not run."""
    env = {**os.environ, **made.environment}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=30).stdout
