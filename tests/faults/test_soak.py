"""A long job among faults: ``make soak`` takes half an hour, a test run one round of each fault.

No fault here ends the job: stopped processes continue, lost connections are made again, and
unauthenticated peers stay rejected. Two spinning processes compete for the cores, and shapes change
at every step. The weights must equal those of an undisturbed run, and no process may grow.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import zmq

from pipeworker.job.options import Options
from pipeworker.wire import sockets
from support.faults.unauthenticated_peers import (
    SilentConnections,
    invalid_frames,
    peers_without_key,
    send_random_bytes,
)
from support.faults.usage import Usage, check_flat, usage
from support.processes.proxy import Proxy
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, until
from support.real_jobs.manual_job import ManualJob
from support.slow import slow

SECONDS = float(os.environ.get("SOAK_SECONDS", 0))
SEED = int(os.environ.get("SOAK_SEED", 0))
STAGES, MICROBATCHES, PACE = 3, 4, 0.25
STEPS = int(max(SECONDS, 8) / PACE)
PAUSE = 2.0 if SECONDS else 0.3
"""The maximum number of seconds that a fault lasts, and between two faults."""
CONNECTIONS = 300
FRAMES = 200

SHAPES = f"""
    import random
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    GO = Path("go")
    QUIET = "quiet" in sys.argv

    class Pool(nn.Module):
        def forward(self, x):
            return x.mean(1)

    def model():
        return nn.Sequential(
            nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.Tanh(),
            nn.Linear(128, 128), Pool(), nn.Linear(128, 3),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-3)

    def data():
        started = time.monotonic()
        for number in range({STEPS}):
            last = number >= {STEPS - 4}
            while not QUIET and not GO.exists() and (
                last or time.monotonic() < started + {PACE} * number
            ):
                time.sleep(0.02)
            length = int(2 ** random.uniform(0, 10))
            x = torch.randn(random.randint(1, 12), length, 32)
            yield x, (x[:, 0, 0] > 0).long()
"""
"""A job that runs at a fixed pace and withholds its last steps until the file ``go`` exists."""


@dataclass
class Soak:
    """A job, the faults injected into it, and the resources of its processes after each fault."""

    job: ManualJob
    context: zmq.Context[zmq.Socket[bytes]]
    chance: random.Random
    pids: dict[str, int]
    fired: Counter[str] = field(default_factory=Counter)
    usage: defaultdict[str, list[Usage]] = field(default_factory=lambda: defaultdict(list))

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            **{f"{name} stopped": partial(self._stop, pid) for name, pid in self.pids.items()},
            "control connections reset": self._reset,
            "control messages lost": self._lose,
            "invalid frames from a peer": self._send_invalid_frames,
            "peers without the key": self._connect_without_key,
            "silent connections": self._connect_silently,
        }

    def round(self) -> None:
        """Inject each fault once, in random order."""
        for name in self.chance.sample(sorted(self.faults), len(self.faults)):
            assert self.job.verdict is None, f"over after {dict(self.fired)}: {self.job.verdict}"
            self.faults[name]()
            self.fired[name] += 1
            for process, pid in self.pids.items():
                self.usage[process].append(usage(pid))
            time.sleep(self.chance.uniform(0, PAUSE))

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        time.sleep(self.chance.uniform(0, PAUSE))
        os.kill(pid, signal.SIGCONT)

    def _reset(self) -> None:
        proxy = self._proxy()
        before = proxy.broken
        proxy.reset()
        assert proxy.broken > before

    def _lose(self) -> None:
        proxy = self._proxy()
        before = proxy.lost
        proxy.swallow()
        until(lambda: proxy.lost > before)  # heartbeats at least
        time.sleep(self.chance.uniform(0, PAUSE))
        proxy.reset()

    def _proxy(self) -> Proxy:
        """Return the proxy once all workers are connected."""
        proxy = self.job.proxy
        assert proxy
        until(lambda: proxy.ends >= 2 * STAGES)
        return proxy

    def _send_invalid_frames(self) -> None:
        inside = sockets.client(self.context, self.job.token, self.job.endpoint)
        inside.setsockopt(zmq.SNDTIMEO, 20_000)
        for frame in invalid_frames(self.chance, FRAMES):
            inside.send(frame)
        inside.close(linger=1000)

    def _connect_without_key(self) -> None:
        peers = peers_without_key(self.context, self.job.token, self.job.endpoint)
        send_random_bytes(self.job.endpoint, self.chance)
        assert not any(peer.poll(0) for peer in peers)
        for peer in peers:
            peer.close(linger=0)

    def _connect_silently(self) -> None:
        connections = SilentConnections(self.job.endpoint, CONNECTIONS)
        try:
            until(lambda: connections.lost)
        finally:
            connections.close()

    def check_flat(self) -> None:
        """Check that no process grows; in a short test, that its memory does is no error."""
        for name, rows in self.usage.items():
            check_flat(name, rows, 1.1 if SECONDS else math.inf, 4 << 20)


@contextmanager
def burners() -> Iterator[None]:
    """Run two processes that spin at the lowest priority."""
    with ExitStack() as stack:
        for _ in range(2 if SECONDS else 0):
            burner = stack.enter_context(
                subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
            )
            stack.callback(burner.kill)
        yield


@slow
@pytest.mark.timeout(4 * SECONDS + 120)
def test_faults_change_no_bit_and_no_process_grows(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(jobs.folder)
    path = jobs.folder / "attacked"
    options = Options(
        str(jobs.write(SHAPES)), STAGES, MICROBATCHES, clip_grad_norm=1.0, worker_timeout=30.0
    )
    job = ManualJob(options, path, proxied=True)
    try:
        until(lambda: job.steps >= 2)
        workers = {f"stage {stage['stage']}": stage["pid"] for stage in Record(path).plan["stages"]}
        pids = {"coordinator": job.coordinator.pid, "agent": job.agent.pid, **workers}
        end = time.monotonic() + SECONDS
        with burners(), zmq.Context() as context:
            soak = Soak(job, context, random.Random(SEED), pids)
            soak.round()
            while time.monotonic() < end:
                soak.round()
        reached = job.steps
        (jobs.folder / "go").touch()
        until(lambda: job.verdict, 60 + 2 * SECONDS)
    finally:
        job.close()
    print(f"\nseed {SEED}: {sum(soak.fired.values())} faults in the first {reached} steps")
    for name, count in sorted(soak.fired.items()):
        print(f"{count:6} {name}")
    assert job.verdict
    assert (job.verdict.status, job.verdict.error) == ("done", None)
    assert (job.codes, job.steps) == ([0, 0], STEPS)
    soak.check_flat()
    words = ("--stages", str(STAGES), "--microbatches", str(MICROBATCHES), "--clip-grad-norm", "1")
    quiet = jobs.train(*words, "--", "quiet", source=SHAPES, timeout=60 + 2 * SECONDS)
    assert_same(Record(path), quiet)
