"""Standard streams with which a job does what it likes."""

from __future__ import annotations

import io
import os
import sys

import pytest

from pipeworker.host import streams
from pipeworker.wire.messages.failure import Abort
from pipeworker.worker import control


class _Odd(io.TextIOBase):
    """As jobs have them that send what is printed elsewhere."""

    def write(self, text: str, /) -> int:
        raise RuntimeError(text)

    def flush(self) -> None:
        raise RuntimeError


def _closed() -> io.TextIOBase:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [_closed(), _Odd(), None])
def test_a_worker_whose_job_has_closed_its_streams_still_ends(
    stream: io.TextIOBase | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    control.leave_process(Abort("another rank is gone", 1))
    monkeypatch.undo()
    assert ended == [1]


def test_what_nobody_can_read_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _closed())
    streams.note("the channel is another one")
    streams.flush()


def test_what_is_said_in_a_log_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    streams.note("one\ntwo")
    assert capsys.readouterr().err == "[pipeworker] one\n[pipeworker] two\n"
