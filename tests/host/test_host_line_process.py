"""A child process that speaks lines, here another program."""

from __future__ import annotations

import shlex

from pipeworker.host.line_process import LineProcess
from pipeworker.wire.lines import FromHooks, ToHooks, Warned, encode


def test_what_a_process_prints_before_its_first_line_is_skipped() -> None:
    """A ``sitecustomize`` may print into the standard output of each of our processes."""
    warned = Warned("hooks: late")
    script = f"echo hello; printf %s {shlex.quote(encode(warned).decode())}"
    process: LineProcess[ToHooks, FromHooks] = LineProcess("hooks", ["sh", "-c", script], FromHooks)
    received: list[FromHooks] = []
    more = True
    while more and not received:
        received, more = process.receive()
    assert received == [warned]
    assert process.skipped() == ["hello"]
    assert process.skipped() == []
    process.wait(5.0)
