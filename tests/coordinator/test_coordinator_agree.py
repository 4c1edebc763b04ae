"""What all hosts must have alike: who has not is named, and who comes too late hears why."""

from __future__ import annotations

import msgpack
import pytest

from pipeworker.coordinator.effects import Send
from pipeworker.coordinator.events import Foreign
from pipeworker.coordinator.states import State
from pipeworker.errors import ProtocolError
from pipeworker.wire import codec
from pipeworker.wire.messages.failure import Abort
from pipeworker.wire.messages.plan import Described, Source
from pipeworker.wire.messages.presence import Hello
from support.coordinator import LAYERS, Scripted, of

OURS = ("pipeworker 0.1.0", "torch 2.13.0", "Python 3.11")
OLD = ("pipeworker 0.1.0", "torch 2.12.1", "Python 3.11")


def greeted(*versions: tuple[str, ...]) -> Scripted:
    job = Scripted(len(versions))
    for rank, some in enumerate(versions):
        job.says(Hello(rank, f"host-{rank}", 1, some), peer=f"w{rank}".encode())
    return job


def test_the_same_versions_are_nothing_to_speak_of() -> None:
    assert greeted(OURS, OURS, OURS).state() is State.JOINING


@pytest.mark.parametrize(("versions", "odd"), [((OURS, OLD), 1), ((OLD, OURS, OURS), 0)])
def test_who_runs_another_version_than_most_is_named(
    versions: tuple[tuple[str, ...], ...], odd: int
) -> None:
    failure = greeted(*versions).failure
    expected = f"rank {odd} on host-{odd} runs torch 2.12.1, and others torch 2.13.0"
    assert failure.message.startswith(expected)


def described(*sources: tuple[Source, ...]) -> Scripted:
    job = Scripted(len(sources))
    job.join()
    for rank, some in enumerate(sources):
        job.says(Described(rank, LAYERS, (), sources=some), peer=f"w{rank}".encode())
    return job


def test_a_file_that_differs_is_named_with_its_host() -> None:
    same, mine, theirs = Source("job.py", "a"), Source("net.py", "b"), Source("net.py", "c")
    assert described((same, mine), (same,), (same, mine)).state() is State.BUILDING
    job = described((same, mine), (same,), (same, theirs))
    expected = "net.py is not the same on all hosts: rank 2 on host has another one than rank 0 on"
    assert job.failure.message.startswith(expected)
    assert job.ended.exit_status == 2


def test_a_setting_of_torchs_that_differs_is_named_with_its_host() -> None:
    def told(*settings: tuple[str, ...]) -> Scripted:
        job = Scripted(len(settings))
        job.join()
        for rank, some in enumerate(settings):
            job.says(Described(rank, LAYERS, (), settings=some), peer=f"w{rank}".encode())
        return job

    off, on, same = "benchmark = False", "benchmark = True", "precision = highest"
    assert told((off, same), (off, same)).state() is State.BUILDING
    job = told((on, same), (off, same), (off, same))
    expected = f"rank 0 on host has {on}, and rank 1 on host {off}: the numbers of a job depend"
    assert job.failure.message.startswith(expected)
    assert job.ended.exit_status == 2


def test_another_protocol_is_named_before_anybody_has_joined() -> None:
    frame = msgpack.packb([codec.VERSION - 1, 1, "Hello", [3, "host-3", 9, "a field of old"]])
    with pytest.raises(codec.OtherVersion, match="rank 3 on host-3 speaks version") as caught:
        codec.decode(frame)
    job = Scripted(2)
    job.handle(Foreign(str(caught.value)))
    assert job.failure.message.endswith("all hosts of a job need the same version of pipeworker")
    (answer,) = of(job.says(Hello(1, "host", 7), peer=b"late"), Send)  # it would wait for nothing
    assert isinstance(answer.message, Abort)
    assert answer.message.reason == job.failure.message
    assert job.says(Hello(1, "host", 8), peer=b"later") == []


@pytest.mark.parametrize("fields", [[], ["0", "host"], [0], [0, 1], "ab", None])
def test_what_is_no_hello_of_another_version_is_only_a_frame_of_it(fields: object) -> None:
    with pytest.raises(ProtocolError, match="this is version") as caught:
        codec.decode(msgpack.packb([codec.VERSION - 1, 1, "Hello", fields]))
    assert not isinstance(caught.value, codec.OtherVersion)


def test_a_job_that_runs_does_not_mind_another_protocol() -> None:
    job = Scripted(2).running()
    job.handle(Foreign("rank 1 on host-1 speaks version 2"))
    assert job.state() is State.STEPPING
