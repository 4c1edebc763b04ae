"""A real job under attack: strangers get nothing, an authenticated peer's rubbish harms nothing."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from pipeworker.job.options import Options
from pipeworker.session.processes import coordinator
from pipeworker.wire import sockets
from pipeworker.wire.codec import MAX_FRAME_BYTES
from pipeworker.wire.exchange import MOST_KEPT, OUTSIDE, numbered
from pipeworker.wire.keys import client_keys, new_token, server_keys
from pipeworker.wire.lines import Bound, Configuration, FromCoordinator, Verdict
from pipeworker.wire.messages.failure import Cause, Failed, Failure
from pipeworker.wire.messages.limits import LONGEST_VALUE, MOST_KEYS
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Heartbeat, Hello
from pipeworker.wire.messages.store import StoreOperation, StoreRequest
from support.jobs import Jobs, Run, until
from support.own import GENERATION, OwnJob
from support.sources import JOB
from support.strangers import Crowd, descriptors, framed, lies, outsiders, raw_garbage, rubbish

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


def slow(job_file: Path, steps: int) -> Options:
    words = ("slow", "60")
    return Options(str(job_file), 2, 2, arguments=words, steps=steps, recompute="never")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_rubbish_and_strangers_change_nothing(
    jobs: Jobs, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.folder)
    steps = 70
    job_file = jobs.write(SLOW_JOB)
    chance = random.Random(1)
    attacked = OwnJob(slow(job_file, steps), jobs.folder / "attacked")
    try:
        until(lambda: attacked.steps >= 5)
        before = attacked.resident()
        outside = outsiders(context, attacked.token, attacked.endpoint)
        raw_garbage(attacked.endpoint, chance)
        inside = sockets.client(context, attacked.token, attacked.endpoint)
        inside.setsockopt(zmq.SNDTIMEO, 10_000)
        inside.setsockopt(zmq.LINGER, 0)
        for lie in lies():
            inside.send(framed(lie, GENERATION - 1))  # a replay of an older generation
        until(lambda: "of generation 0 (" in attacked.log)
        for frame in rubbish(chance, FRAMES):
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
    broken = OwnJob(slow(job_file, 30), jobs.folder / "broken", proxied=True)
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
        options = slow(jobs.write(SLOW_JOB), 20)
        attacked = OwnJob(options, jobs.folder / "attacked", 256, gather)
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
    own = OwnJob(slow(jobs.write(SLOW_JOB), 20), plan.parent)
    try:
        until(lambda: own.verdict)
    finally:
        own.close()
    assert own.verdict
    assert own.verdict.status == "failed"
    assert own.verdict.error
    assert f"cannot write {plan}: Is a directory" in own.verdict.error


def test_a_member_that_asks_without_end_is_named(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """It never says what it has, and so all that it was answered is kept for it."""
    run_dir, token = tmp_path / "own", new_token()
    (run_dir / "logs").mkdir(parents=True)
    process = coordinator()
    try:
        options = Options("job.py", 1, 1).to_json()
        process.say(Configuration(options, str(run_dir), token, "127.0.0.1", GENERATION))
        heard: list[FromCoordinator] = []

        def hear(kind: type[FromCoordinator]) -> FromCoordinator:
            while not (found := [event for event in heard if isinstance(event, kind)]):
                events, more = process.hear()
                heard.extend(events)
                assert more
            return found[0]

        bound = hear(Bound)
        assert isinstance(bound, Bound)
        member = sockets.client(context, token, bound.endpoint)
        keys = tuple(map(str, range(MOST_KEYS)))
        value = bytes(LONGEST_VALUE)
        member.send(framed(Hello(0, "half \ud800", 1), GENERATION))
        for again in (False, True) * 500:
            beat = Heartbeat(0, Position(), 1 << 40, 0, again)
            member.send(framed(beat, GENERATION))
        for _ in range(500):
            echo = Failure(Cause.PEER, "no more " * 1000, 0)
            member.send(framed(Failed(0, echo), GENERATION))
        for key in keys:
            request = StoreRequest(0, 1, StoreOperation.SET, (key,), value)
            member.send(framed(request, GENERATION))
        for number in range(2 + MOST_KEPT // (MOST_KEYS * LONGEST_VALUE)):
            member.send(framed(StoreRequest(0, number, StoreOperation.GET, keys), GENERATION))
        verdict = hear(Verdict)
    finally:
        process.hang_up()
        code = process.finish(5.0)
    assert isinstance(verdict, Verdict)
    assert verdict.error
    assert "sent what cannot be: it asks, and never says that it has" in verdict.error
    assert code == 1
    log = (run_dir / "logs" / "coordinator.log").read_text()
    assert len(log) < 40_000
    assert r"rank 0 joined: pid 1 on half \ud800" in log


def holds_secret(token: str, data: bytes) -> bool:
    keys = server_keys(token).secret, client_keys(token).secret
    return any(secret in data for secret in (token.encode(), *keys))
