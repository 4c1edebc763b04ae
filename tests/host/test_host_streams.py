"""Standard streams that a job has closed or replaced."""

from __future__ import annotations

import io
import os
import sys

import pytest

from pipeworker.host import streams
from pipeworker.wire.messages.presence import Abort
from pipeworker.worker import control


class _Failing(io.TextIOBase):
    """A stream of a job that sends its output elsewhere."""

    def write(self, text: str, /) -> int:
        raise RuntimeError(text)

    def flush(self) -> None:
        raise RuntimeError


def _closed() -> io.TextIOBase:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [_closed(), _Failing(), None])
def test_a_worker_whose_job_has_closed_its_streams_still_ends(
    stream: io.TextIOBase | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    control.exit_process(Abort("another rank is gone", 1))
    monkeypatch.undo()
    assert ended == [1]


def test_a_note_to_a_closed_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _closed())
    streams.note("the channel is another one")
    streams.flush()


def test_a_note_has_a_prefix_on_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    streams.note("one\ntwo")
    assert capsys.readouterr().err == "[pipeworker] one\n[pipeworker] two\n"


def test_a_note_that_no_disk_takes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(OSError, match="No space left"):
            print("the disk is full", file=sys.stderr, flush=True)
        streams.note("the timeline is not recorded any more")
