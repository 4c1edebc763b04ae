"""The messages of commands for errors that are not pipeworker's own."""

from __future__ import annotations

import pytest

from launcher.command import Shown, clearly


def test_a_thread_that_the_system_refuses_is_one_message() -> None:
    text = "the system grants no more threads or processes; raise the limit"
    with pytest.raises(Shown, match=text), clearly():
        raise RuntimeError("can't start new thread")
    with pytest.raises(RuntimeError, match="another"), clearly():
        raise RuntimeError("another")
