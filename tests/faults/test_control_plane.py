"""A real job under attack: neither unauthenticated peers nor invalid frames affect it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.limits import LONGEST_VALUE, MOST_KEYS
from pipeworker.facts.position import Position
from pipeworker.host.line_process import start_coordinator
from pipeworker.job.options import Options
from pipeworker.wire import sockets
from pipeworker.wire.codec import MAX_FRAME_BYTES
from pipeworker.wire.keys import client_keys, new_token, server_keys
from pipeworker.wire.lines import Bound, Configuration, FromCoordinator, Verdict
from pipeworker.wire.messages.presence import Failed, Heartbeat, Hello
from pipeworker.wire.messages.store import StoreOperation, StoreRequest
from pipeworker.wire.reliable_stream import MAX_UNACKNOWLEDGED, UNNUMBERED, pack
from support.faults.unauthenticated_peers import (
    SilentConnections,
    descriptor_limit,
    forged_messages,
    framed,
    invalid_frames,
    peers_without_key,
    send_random_bytes,
)
from support.real_jobs.jobs import Jobs, Record, until
from support.real_jobs.manual_job import GENERATION, ManualJob
from support.real_jobs.sources import JOB
from support.slow import slow

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
"""With the arguments ``slow N`` it is slow, and after N mini-batches waits for a file ``go``."""

FRAMES = 10_000
CONNECTIONS = 400


def slow_job(job_file: Path, steps: int) -> Options:
    words = ("slow", "20")
    return Options(str(job_file), 2, 2, arguments=words, steps=steps, recompute="never")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_invalid_frames_and_unauthenticated_peers_change_nothing(
    jobs: Jobs, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    steps = 24
    job_file = jobs.write(SLOW_JOB)
    chance = random.Random(1)
    attacked = ManualJob(slow_job(job_file, steps), jobs.folder / "attacked")
    try:
        until(lambda: attacked.steps >= 5)
        before = attacked.resident()
        outside = peers_without_key(context, attacked.token, attacked.endpoint)
        send_random_bytes(attacked.endpoint, chance)
        inside = sockets.client(context, attacked.token, attacked.endpoint)
        inside.setsockopt(zmq.SNDTIMEO, 10_000)
        inside.setsockopt(zmq.LINGER, 0)
        for lie in forged_messages():
            inside.send(framed(lie, GENERATION - 1))  # a replay of an earlier generation
        until(lambda: "of generation 0 (" in attacked.log)
        for frame in invalid_frames(chance, FRAMES):
            inside.send(frame)
        for _ in range(20):
            long_name = msgpack.packb(["1" * 100_000, 1, "Ping", []])
            inside.send(pack(UNNUMBERED, long_name))
            inside.send_multipart([b"two", b"parts"])
        until(lambda: f"({FRAMES} so far)" in attacked.log)
        inside.send(bytes(MAX_FRAME_BYTES + 1))  # closes the sender's connection
        during = attacked.steps
        assert during < steps, "the job ended before the attack did"
        assert attacked.resident() - before < 8 << 20
        assert not any(peer.poll(0) for peer in outside)
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

    check_numbers(jobs, attacked)


def check_numbers(jobs: Jobs, attacked: ManualJob) -> None:
    """Check that the numbers equal those of a run without an attack."""
    words = ("--stages", "2", "--microbatches", "2", "--recompute", "never")
    quiet = jobs.train(*words, "--steps", str(attacked.steps), source=SLOW_JOB)
    run = Record(attacked.run_dir)
    for name in ("step", "loss", "grad_norm", "samples", "epoch"):
        assert [row[name] for row in run.metrics] == [row[name] for row in quiet.metrics]
    assert len(run.metrics) == attacked.steps
    assert all((run.weights[key] == value).all() for key, value in quiet.weights.items())


@slow
def test_messages_of_a_broken_connection_are_resent(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control connections are reset while messages are in flight: the job continues."""
    monkeypatch.chdir(jobs.folder)
    job_file = jobs.write(SLOW_JOB)
    (jobs.folder / "go").touch()
    broken = ManualJob(slow_job(job_file, 30), jobs.folder / "broken", proxied=True)
    try:
        for least in (3, 12):
            until(lambda least=least: broken.steps >= least)  # type: ignore[misc]
            proxy = broken.proxy
            assert proxy
            proxy.swallow()
            stopped = until(lambda proxy=proxy: proxy.lost and paused_step(broken))  # type: ignore[misc]
            assert stopped < 30
            proxy.reset()
        until(lambda: broken.verdict)
    finally:
        broken.close()
    assert broken.verdict
    assert (broken.verdict.status, broken.verdict.error) == ("done", None)
    assert broken.codes == [0, 0]
    assert re.search("messages of rank . are lost and requested again|are sent again", broken.log)

    words = ("--stages", "2", "--microbatches", "2", "--recompute", "never", "--steps", "30")
    quiet = jobs.train(*words, source=SLOW_JOB)
    run = Record(jobs.folder / "broken")
    for name in ("step", "loss", "grad_norm"):
        assert [row[name] for row in run.metrics] == [row[name] for row in quiet.metrics]
    assert all((run.weights[key] == value).all() for key, value in quiet.weights.items())


def paused_step(job: ManualJob) -> int:
    """Return the current step if no step follows for a while, else 0."""
    before = job.steps
    time.sleep(0.6)  # a step takes a tenth of this
    return before if job.steps == before else 0


@slow
def test_silent_connections_take_no_workers_place_and_no_files_descriptor(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "3")  # the flood leaves little of a busy host
    connections: list[SilentConnections] = []

    def gather(endpoint: str) -> None:
        connections.append(SilentConnections(endpoint, CONNECTIONS))
        until(lambda: connections[0].lost > CONNECTIONS)

    with descriptor_limit(2 * CONNECTIONS):
        options = slow_job(jobs.write(SLOW_JOB), 12)
        attacked = ManualJob(options, jobs.folder / "attacked", 256, gather)
        try:
            until(lambda: attacked.steps >= 5)
            before = connections[0].lost
            until(lambda: connections[0].lost > before + CONNECTIONS)
            (jobs.folder / "go").touch()
            until(lambda: attacked.verdict)
        finally:
            attacked.close()
            for one in connections:
                one.close()
    assert attacked.verdict
    assert (attacked.verdict.status, attacked.verdict.error) == ("done", None)
    assert (attacked.codes, attacked.steps) == ([0, 0], 12)
    (cut,) = re.findall(r"(\d+) unauthenticated connections were closed", attacked.log)
    assert int(cut) > 2 * CONNECTIONS
    assert len(attacked.log) < 5000
    assert (attacked.run_dir / "summary.json").exists()
    check_numbers(jobs, attacked)


def test_a_file_that_cannot_be_written_is_named(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    plan = jobs.folder / "own" / "plan.json"
    plan.mkdir(parents=True)
    own = ManualJob(slow_job(jobs.write(SLOW_JOB), 20), plan.parent)
    try:
        until(lambda: own.verdict)
    finally:
        own.close()
    assert own.verdict
    assert own.verdict.status == "failed"
    assert own.verdict.error
    assert f"{plan}: cannot be written: Is a directory" in own.verdict.error


def test_a_member_that_never_acknowledges_is_named(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """The answers it does not acknowledge are kept for it, up to a limit."""
    run_dir, token = tmp_path / "own", new_token()
    (run_dir / "logs").mkdir(parents=True)
    process = start_coordinator()
    try:
        options = Options("job.py", 1, 1).to_json()
        process.send(Configuration(options, str(run_dir), token, "127.0.0.1", GENERATION))
        received: list[FromCoordinator] = []

        def receive(kind: type[FromCoordinator]) -> FromCoordinator:
            while not (found := [event for event in received if isinstance(event, kind)]):
                events, more = process.receive()
                received.extend(events)
                assert more
            return found[0]

        bound = receive(Bound)
        assert isinstance(bound, Bound)
        member = sockets.client(context, token, bound.endpoint)
        keys = tuple(map(str, range(MOST_KEYS)))
        value = bytes(LONGEST_VALUE)
        member.send(framed(Hello(0, "half \ud800", 1), GENERATION))
        for missing in (False, True) * 500:
            beat = Heartbeat(0, Position(), 1 << 40, 0, missing)
            member.send(framed(beat, GENERATION))
        for _ in range(500):
            secondary = Failure(Cause.PEER, "no more " * 1000, 0)
            member.send(framed(Failed(0, secondary), GENERATION))
        for key in keys:
            request = StoreRequest(0, 1, StoreOperation.SET, (key,), value)
            member.send(framed(request, GENERATION))
        for number in range(2 + MAX_UNACKNOWLEDGED // (MOST_KEYS * LONGEST_VALUE)):
            member.send(framed(StoreRequest(0, number, StoreOperation.GET, keys), GENERATION))
        verdict = receive(Verdict)
    finally:
        process.close_input()
        code = process.wait(60.0)
    assert isinstance(verdict, Verdict)
    assert verdict.error
    assert "sent an invalid message: it sends requests and never acknowledges" in verdict.error
    assert code == 1
    log = (run_dir / "logs" / "coordinator.log").read_text()
    assert len(log) < 40_000
    assert r"rank 0 joined: pid 1 on half \ud800" in log


def holds_secret(token: str, data: bytes) -> bool:
    keys = server_keys(token).secret, client_keys(token).secret
    return any(secret in data for secret in (token.encode(), *keys))
