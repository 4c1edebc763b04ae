"""Comparison of the workers: the one that differs is named, and late workers learn the reason."""

from __future__ import annotations

import msgpack
import pytest

from pipeworker.coordinator.effects import Effect, Send
from pipeworker.coordinator.events import MessageReceived, VersionMismatch
from pipeworker.coordinator.waiting import State
from pipeworker.errors import ProtocolError
from pipeworker.wire import codec
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.plan import Described, Source
from pipeworker.wire.messages.presence import Abort, Hello
from support.pure.coordinator import LAYERS, ScriptedJob, of, replaceable_job

OURS = ("pipeworker 0.1.0", "torch 2.13.0", "Python 3.11")
OLD = ("pipeworker 0.1.0", "torch 2.12.1", "Python 3.11")


def greeted(*versions: tuple[str, ...]) -> ScriptedJob:
    job = ScriptedJob(len(versions))
    for rank, some in enumerate(versions):
        job.receive(Hello(rank, f"host-{rank}", 1, some), peer=f"w{rank}".encode())
    return job


def test_equal_versions_are_accepted() -> None:
    assert greeted(OURS, OURS, OURS).state() is State.JOINING


@pytest.mark.parametrize(("versions", "odd"), [((OURS, OLD), 1), ((OLD, OURS, OURS), 0)])
def test_a_worker_with_another_version_than_most_is_named(
    versions: tuple[tuple[str, ...], ...], odd: int
) -> None:
    failure = greeted(*versions).failure
    expected = f"rank {odd} on host-{odd}: it runs torch 2.12.1, and others torch 2.13.0"
    assert failure.message.startswith(expected)


def test_workers_with_different_builds_of_one_torch_are_not_alike() -> None:
    """Their kernels differ, and with them the bits."""
    failure = greeted(*[(f"torch 2.13.0+{build}",) for build in ("cpu", "cu130", "cpu")]).failure
    expected = "rank 1 on host-1: it runs torch 2.13.0+cu130, and others torch 2.13.0+cpu; install"
    assert failure.message.startswith(expected)


def described(*sources: tuple[Source, ...]) -> ScriptedJob:
    job = ScriptedJob(len(sources))
    job.join()
    for rank, some in enumerate(sources):
        job.receive(Described(rank, LAYERS, (), sources=some), peer=f"w{rank}".encode())
    return job


def test_a_file_that_differs_is_named_with_its_host() -> None:
    job_file, module, other = Source("job.py", "a"), Source("net.py", "b"), Source("net.py", "c")
    assert described((job_file, module), (job_file,), (job_file, module)).state() is State.BUILDING
    job = described((job_file, module), (job_file,), (job_file, other))
    expected = "net.py: rank 2 on host has another version of it than rank 0 on host"
    assert job.failure.message.startswith(expected)
    assert job.ended.exit_status == 2


def test_files_that_change_between_two_generations_are_named_once() -> None:
    job = replaceable_job()

    def warned(*sources: Source) -> list[str]:
        job.join()
        effects: list[Effect] = []
        for rank in job.ranks:
            effects += job.receive(Described(rank, LAYERS, (), sources=sources))
        job.exited(0, -9)
        return [warning.text for warning in of(effects, Warned)]

    job_file, module = Source("job.py", "a"), Source("net.py", "b")
    changed = Source("job.py", "c"), Source("net.py", "d")
    assert not warned(job_file, module)
    assert not warned(job_file)
    (text,) = warned(*changed, Source("new.py", "e"))
    assert text.startswith("job.py, net.py: changed while the job runs; ")
    assert not warned(*changed)


def test_a_torch_setting_that_differs_is_named_with_its_host() -> None:
    def described_with(*settings: tuple[str, ...]) -> ScriptedJob:
        job = ScriptedJob(len(settings))
        job.join()
        for rank, values in enumerate(settings):
            job.receive(Described(rank, LAYERS, (), settings=values), peer=f"w{rank}".encode())
        return job

    off, on, same = "benchmark = False", "benchmark = True", "precision = highest"
    assert described_with((off, same), (off, same)).state() is State.BUILDING
    job = described_with((on, same), (off, same), (off, same))
    expected = f"rank 0 on host: it has {on}, and rank 1 on host {off}; the numbers of a job depend"
    assert job.failure.message.startswith(expected)
    assert job.ended.exit_status == 2


def test_another_protocol_version_is_named_before_any_worker_joins() -> None:
    frame = msgpack.packb([codec.VERSION - 1, 1, "Hello", [3, "host-3", 9, "a field of old"]])
    with pytest.raises(codec.OtherVersion, match="rank 3 on host-3: it speaks version") as caught:
        codec.decode(frame)
    job = ScriptedJob(2)
    job.handle(VersionMismatch(str(caught.value)))
    assert job.failure.message.endswith("; install the same version of pipeworker on all hosts")
    (answer,) = of(job.receive(Hello(1, "host", 7), peer=b"late"), Send)  # it would wait forever
    assert isinstance(answer.message, Abort)
    assert answer.message.reason == job.failure.message
    assert job.receive(Hello(1, "host", 8), peer=b"later") == []
    assert job.receive(Hello(0, "host", 7), peer=b"late") == []  # one answer for each peer


@pytest.mark.parametrize("launched", [False, True])
def test_a_worker_that_joins_a_failed_job_receives_the_reason(launched: bool) -> None:
    """Not one of an earlier generation; without the reason it would wait until it is ended."""
    job = replaceable_job() if launched else ScriptedJob(2)
    job.handle(VersionMismatch("rank 3 on host-3: another version"))
    assert job.handle(MessageReceived(b"late", job.number - 1, Hello(1, "host", 7))) == []
    (answer,) = of(job.receive(Hello(1, "host", 7), peer=b"late"), Send)
    assert answer.message == Abort(job.failure.message, 2)


@pytest.mark.parametrize("fields", [[], ["0", "host"], [0], [0, 1], "ab", None])
def test_only_a_hello_of_another_version_ends_the_job(fields: object) -> None:
    with pytest.raises(ProtocolError, match="this is version") as caught:
        codec.decode(msgpack.packb([codec.VERSION - 1, 1, "Hello", fields]))
    assert not isinstance(caught.value, codec.OtherVersion)


def test_a_running_job_ignores_another_protocol_version() -> None:
    job = ScriptedJob(2).running()
    job.handle(VersionMismatch("rank 1 on host-1: it speaks version 2"))
    assert job.state() is State.STEPPING
