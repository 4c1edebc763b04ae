"""A real Slurm on this machine: a controller, and nodes that are processes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.jobs import until

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_BROKERS = "/usr/sbin:/usr/local/sbin"
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
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
    """It runs; commands need `environment`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        env = {**os.environ, **self.environment}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Two nodes; skipped where it is not installed, and for who is not root."""
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
    with ExitStack() as probing:
        probes = [probing.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        controller, first, second = (probe.getsockname()[1] for probe in probes)
    ports = {"controller": controller, "first": first, "second": second}
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(folder=folder, **ports))
    made = Slurm(folder)
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> None:
        line = [str(found[name]), *words]
        with (folder / f"{name}.out").open("ab") as out:
            env = {**os.environ, **made.environment}
            started.append(subprocess.Popen(line, cwd="/", env=env, stdout=out, stderr=out))

    files = {"socket": "socket", "key-file": "key", "log-file": "log", "seed-file": "seed"}
    where = [f"--{option}={munge / name}" for option, name in files.items()]
    try:
        start("munged", "--foreground", "--force", f"--pid-file={munge / 'pid'}", *where)
        until((munge / "socket").exists)
        start("slurmctld", "-D", "-f", str(configuration))
        for node in NODES:
            start("slurmd", "-D", "-N", node, "-f", str(configuration))
        idle = [*("sinfo", "--noheader", "--partition", "low", "--states", "idle"), "-o", "%D"]
        until(lambda: _said(made, *idle).strip() == str(len(NODES)))
        yield made
    finally:
        _said(made, "scancel", "--full", "--user", "root")
        until(lambda: not _said(made, "squeue", "--noheader", "--states", "running,completing"))
        for process in reversed(started):
            process.terminate()
            process.wait()


def _said(made: Slurm, *words: str) -> str:
    """Where the controller may not be there yet, or any more."""
    env = {**os.environ, **made.environment}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=30).stdout
