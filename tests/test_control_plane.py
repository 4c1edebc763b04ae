"""A real job under attack: strangers get nothing, an authenticated peer's rubbish harms nothing."""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgpack
import pytest
import zmq

from pipeworker.job.options import Options
from pipeworker.session.processes import coordinator, fork_server
from pipeworker.wire import sockets
from pipeworker.wire.codec import MAX_FRAME_BYTES, encode
from pipeworker.wire.exchange import OUTSIDE, numbered
from pipeworker.wire.keys import client_keys, new_token, server_keys
from pipeworker.wire.lines import Bound, Configuration, Fork, Verdict, WorkerExited
from pipeworker.wire.messages import (
    Batch,
    Built,
    Cause,
    Described,
    Failed,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Phase,
    Position,
    Ready,
    Saved,
    StepDone,
    StepResult,
    StoreOperation,
    StoreRequest,
)
from support.crowd import Crowd, descriptors
from support.jobs import Jobs, Run, processes_of, until
from support.proxy import Proxy
from support.sources import JOB

SLOW_JOB = (
    JOB.replace(
        "    def model():",
        """
    import sys
    import time
    from pathlib import Path

    read = []

    def gate():
        read.append(1)
        while "slow" in sys.argv and len(read) > int(sys.argv[2]) and not Path("go").exists():
            time.sleep(0.02)

    class Slow(nn.Module):
        def forward(self, x):
            if "slow" in sys.argv:
                time.sleep(0.03)
            return x

    def model():""",
    )
    .replace("nn.ReLU()", "nn.ReLU(), Slow()")
    .replace("x = torch.randn(10", "gate()\n            x = torch.randn(10")
)
"""With the words ``slow N`` it takes its time, and after N mini-batches waits for a file ``go``."""

FRAMES = 10_000
STRANGERS = 2000
GENERATION = 1


class OwnJob:
    """A job of two stages started as the local launcher does, with a token known here.

    Args:
        descriptors: what the coordinator may have.
        bound: called with the endpoint before there are workers.
        proxied: workers reach the coordinator through a proxy.
    """

    def __init__(
        self,
        job_file: Path,
        run_dir: Path,
        steps: int,
        descriptors: int | None = None,
        bound: Callable[[str], object] = lambda endpoint: None,
        *,
        proxied: bool = False,
    ) -> None:
        self._bound = bound
        self.token = new_token()
        self.proxied = proxied
        self.proxy: Proxy | None = None
        self.run_dir = run_dir
        self.endpoint = ""
        self.steps = 0
        self.verdict: Verdict | None = None
        self.codes: list[int] = []
        (run_dir / "logs").mkdir(parents=True)
        options = Options(
            str(job_file), 2, 2, arguments=("slow", "60"), steps=steps, recompute="never"
        )
        self.forks = fork_server()
        self.coordinator = coordinator()
        if descriptors is not None:
            limits = (descriptors, descriptors)
            resource.prlimit(self.coordinator._process.pid, resource.RLIMIT_NOFILE, limits)
        self.coordinator.say(
            Configuration(options.to_json(), str(run_dir), self.token, "127.0.0.1", GENERATION)
        )
        hears = (self._hear_coordinator, self._hear_forks)
        self.threads = [threading.Thread(target=hear) for hear in hears]
        for thread in self.threads:
            thread.start()

    def _hear_coordinator(self) -> None:
        more = True
        while more:
            events, more = self.coordinator.hear()
            for event in events:
                match event:
                    case Bound():
                        self.endpoint = endpoint = event.endpoint
                        self._bound(event.endpoint)
                        if self.proxied:
                            url = urlsplit(endpoint)
                            self.proxy = Proxy((url.hostname or "", url.port or 0))
                            endpoint = f"tcp://127.0.0.1:{self.proxy.address[1]}"
                        for rank in (0, 1):
                            fork = Fork(rank, GENERATION, endpoint, self.token, rank)
                            self.forks.say(fork)
                    case StepResult():
                        self.steps = event.step
                    case Verdict():
                        self.verdict = event

    def _hear_forks(self) -> None:
        more = True
        while more:
            events, more = self.forks.hear()
            for event in events:
                if isinstance(event, WorkerExited):
                    self.coordinator.say(event)

    @property
    def log(self) -> str:
        return (self.run_dir / "logs" / "coordinator.log").read_text()

    def resident(self) -> int:
        """Bytes of memory the coordinator holds."""
        (pid,) = (
            pid for pid, line in processes_of(Path.cwd()).items() if "coordinator.service" in line
        )
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def close(self) -> None:
        for process in (self.forks, self.coordinator):
            process.hang_up()
        for thread in self.threads:
            thread.join(10)
        self.codes = [process.finish(5.0) for process in (self.forks, self.coordinator)]
        if self.proxy is not None:
            self.proxy.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def lies() -> list[Message]:
    """Well-formed messages that would end or derail the job, were they believed."""
    batch = Batch(9, 1, 1, 9)
    return [
        Hello(0, "elsewhere", 1),
        Hello(7, "x" * 500, 1),
        Described(0, ("Linear",), ()),
        Ready(0, (Built(0, 0, (), 0),), "cpu", batch),
        *(StepDone(1, s, (9.0,), (), (9.0,), 0.0, 0.0, 0, None) for s in range(1, 80)),
        Saved(0, 1),
        Heartbeat(1, Position(Phase.FORWARD, 1, 1, 1)),
        Failed(0, Failure(Cause.USER, "I am stage 0 and have failed", 0)),
        Failed(1, Failure(Cause.SIGNAL, "so have I", 1)),
        StoreRequest(0, 1, StoreOperation.SET, ("shared/replica-0/0>1/activation",), b"x"),
        StoreRequest(0, 2, StoreOperation.GET, ("never",)),
    ]


def framed(message: Message, generation: int = GENERATION) -> bytes:
    """As it crosses the wire, outside the numbers."""
    return numbered(OUTSIDE, encode(message, generation))


def rubbish(chance: random.Random) -> Iterator[bytes]:
    """Lies as they are, lies with a few bytes changed, and bytes at random."""
    frames = [framed(lie) for lie in lies()]
    for number in range(FRAMES):
        frame = bytearray(chance.choice(frames))
        match number % 3:
            case 1:
                for _ in range(chance.randint(1, 4)):
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
            case 2:
                frame = bytearray(chance.randbytes(chance.randrange(300)))
        yield bytes(frame)


def strangers(context: zmq.Context[zmq.Socket[bytes]], job: OwnJob) -> list[zmq.Socket[bytes]]:
    """Peers without the job's key, each having sent what would be believed of a right one."""
    other_job = sockets.client(context, new_token(), job.endpoint)
    bare = context.socket(zmq.DEALER)
    bare.connect(job.endpoint)
    own_key = context.socket(zmq.DEALER)
    own_key.curve_publickey, own_key.curve_secretkey = zmq.curve_keypair()
    own_key.curve_serverkey = server_keys(job.token).public
    own_key.connect(job.endpoint)
    for peer in (other_job, bare, own_key):
        peer.setsockopt(zmq.SNDTIMEO, 0)
        peer.setsockopt(zmq.LINGER, 0)
        for lie in lies():
            with suppress(zmq.Again):
                peer.send(framed(lie))
    return [other_job, bare, own_key]


def raw_garbage(endpoint: str, chance: random.Random) -> None:
    """Bytes that are no ZMTP, on connections closed in all the ways there are."""
    url = urlsplit(endpoint)
    assert url.port
    for number in range(60):
        with (
            socket.create_connection((url.hostname, url.port), timeout=5) as made,
            suppress(OSError),  # the server has closed it already
        ):
            made.sendall(chance.randbytes(chance.randrange(2000)) if number % 3 else b"\xff" * 10)
            if number % 2:
                made.shutdown(socket.SHUT_WR)


def test_rubbish_and_strangers_change_nothing(
    jobs: Jobs, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    steps = 70
    job_file = jobs.write(SLOW_JOB)
    chance = random.Random(1)
    attacked = OwnJob(job_file, jobs.folder / "attacked", steps)
    try:
        until(lambda: attacked.steps >= 5)
        before = attacked.resident()
        outside = strangers(context, attacked)
        raw_garbage(attacked.endpoint, chance)
        inside = sockets.client(context, attacked.token, attacked.endpoint)
        inside.setsockopt(zmq.SNDTIMEO, 10_000)
        inside.setsockopt(zmq.LINGER, 0)
        for lie in lies():
            inside.send(framed(lie, GENERATION - 1))  # a replay of an older generation
        until(lambda: "of generation 0 (" in attacked.log)
        for frame in rubbish(chance):
            inside.send(frame)
        for _ in range(20):
            wants_into_the_log = msgpack.packb(["1" * 100_000, 1, "Ping", []])
            inside.send(numbered(OUTSIDE, wants_into_the_log))
            inside.send_multipart([b"two", b"parts"])
        until(lambda: f"({FRAMES} so far)" in attacked.log)
        inside.send(bytes(MAX_FRAME_BYTES + 1))  # costs the sender its connection
        during = attacked.steps
        assert during < steps, "the job was over before the attack was"
        assert attacked.resident() - before < 8 << 20
        assert not any(peer.poll(0) for peer in outside)
        assert secrets_seen(attacked.token, processes_of(jobs.folder)) == []
        (jobs.folder / "go").touch()
        until(lambda: attacked.verdict)
    finally:
        attacked.close()
    assert attacked.verdict
    assert (attacked.verdict.status, attacked.verdict.error) == ("done", None)
    assert attacked.codes == [0, 0]
    assert attacked.steps == steps > during
    assert len(attacked.log) < 20_000
    for file in (jobs.folder / "attacked").rglob("*"):
        assert not file.is_file() or not holds_secret(attacked.token, file.read_bytes()), file

    as_without_an_attack(jobs, attacked)


def as_without_an_attack(jobs: Jobs, attacked: OwnJob) -> None:
    """The numbers are those of a quiet run."""
    words = ("--stages", "2", "--microbatches", "2", "--recompute", "never")
    quiet = jobs.train(*words, "--steps", str(attacked.steps), source=SLOW_JOB)
    run = Run(0, "", "", attacked.run_dir)
    for name in ("step", "loss", "grad_norm", "samples", "epoch"):
        assert [row[name] for row in run.metrics] == [row[name] for row in quiet.metrics]
    assert len(run.metrics) == attacked.steps
    assert all((run.weights[key] == value).all() for key, value in quiet.weights.items())


def test_what_a_broken_connection_had_under_way_is_not_lost(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control connections are reset while messages are under way: the job goes on with each."""
    monkeypatch.chdir(jobs.folder)
    job_file = jobs.write(SLOW_JOB)
    (jobs.folder / "go").touch()
    broken = OwnJob(job_file, jobs.folder / "broken", 30, proxied=True)
    try:
        for least in (3, 12):
            until(lambda least=least: broken.steps >= least)  # type: ignore[misc]
            assert broken.proxy
            broken.proxy.swallow()
            stopped = until(lambda: stands_still(broken))
            assert broken.proxy.lost > 0
            assert stopped < 30
            broken.proxy.reset()
        until(lambda: broken.verdict)
    finally:
        broken.close()
    assert broken.verdict
    assert (broken.verdict.status, broken.verdict.error) == ("done", None)
    assert broken.codes == [0, 0]
    assert re.search("messages of rank . are lost: asked for again|are sent again", broken.log)

    words = ("--stages", "2", "--microbatches", "2", "--recompute", "never", "--steps", "30")
    quiet = jobs.train(*words, source=SLOW_JOB)
    run = Run(0, "", "", jobs.folder / "broken")
    for name in ("step", "loss", "grad_norm"):
        assert [row[name] for row in run.metrics] == [row[name] for row in quiet.metrics]
    assert all((run.weights[key] == value).all() for key, value in quiet.weights.items())


def stands_still(job: OwnJob) -> int:
    """The step that no step follows for a while; 0 when one does."""
    before = job.steps
    time.sleep(0.6)  # a step takes a tenth of it
    return before if job.steps == before else 0


def test_silent_connections_cost_no_worker_its_place_and_no_file_its_descriptor(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    crowds: list[Crowd] = []

    def gather(endpoint: str) -> None:
        crowds.append(Crowd(endpoint, STRANGERS))
        until(lambda: crowds[0].cut > STRANGERS)

    with descriptors(2 * STRANGERS):
        attacked = OwnJob(jobs.write(SLOW_JOB), jobs.folder / "attacked", 20, 256, gather)
        try:
            until(lambda: attacked.steps >= 10)
            before = crowds[0].cut
            until(lambda: crowds[0].cut > before + STRANGERS)
            (jobs.folder / "go").touch()
            until(lambda: attacked.verdict)
        finally:
            attacked.close()
            for crowd in crowds:
                crowd.close()
    assert attacked.verdict
    assert (attacked.verdict.status, attacked.verdict.error) == ("done", None)
    assert (attacked.codes, attacked.steps) == ([0, 0], 20)
    (cut,) = re.findall(r"(\d+) connections that had not proven themselves", attacked.log)
    assert int(cut) > 2 * STRANGERS
    assert len(attacked.log) < 5000
    assert (attacked.run_dir / "summary.json").exists()
    as_without_an_attack(jobs, attacked)


def test_a_file_that_cannot_be_written_is_named(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    plan = jobs.folder / "own" / "plan.json"
    plan.mkdir(parents=True)
    own = OwnJob(jobs.write(SLOW_JOB), plan.parent, 20)
    try:
        until(lambda: own.verdict)
    finally:
        own.close()
    assert own.verdict
    assert own.verdict.status == "failed"
    assert own.verdict.error
    assert f"cannot write {plan}: Is a directory" in own.verdict.error


def holds_secret(token: str, data: bytes) -> bool:
    keys = server_keys(token).secret, client_keys(token).secret
    return any(secret in data for secret in (token.encode(), *keys))


def secrets_seen(token: str, pids: dict[int, str]) -> list[str]:
    """Where the token shows to who may look at the processes."""
    assert len(pids) >= 4  # coordinator, fork server, two workers
    return [
        f"/proc/{pid}/{name}"
        for pid in pids
        for name in ("cmdline", "environ")
        if holds_secret(token, Path(f"/proc/{pid}/{name}").read_bytes())
    ]


def test_the_command_shows_no_token(jobs: Jobs) -> None:
    """Nothing that looks like a token in `ps`, in an environment or in a file."""
    looks_like = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
    assert looks_like.fullmatch(new_token().encode())
    words = ("--stages", "2", "--microbatches", "2", "--steps", "30", "--recompute", "never")
    clean = {k: v for k, v in os.environ.items() if not looks_like.search(v.encode())}
    process, run_dir = jobs.start(*words, "--", "slow", "20", source=SLOW_JOB, env=clean, cold=True)
    metrics = run_dir / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    pids = processes_of(jobs.folder)
    assert len(pids) == 5  # the command, coordinator, fork server, two workers
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert not looks_like.search(Path(f"/proc/{pid}/{name}").read_bytes()), pids[pid]
    (jobs.folder / "go").touch()
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    for file in run_dir.rglob("*"):
        assert not file.is_file() or not looks_like.search(file.read_bytes()), file
    assert not looks_like.search((shown + errors).encode())
