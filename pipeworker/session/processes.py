"""Child processes that speak JSON lines over their standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pipeworker

_ROOT = str(Path(pipeworker.__file__).parents[1])
# A module of the user's in the current folder must not be taken for one of ours, so the folder that
# `-c` puts first on the path goes, and where pipeworker was found comes last.
_BOOT = (
    "import sys; sys.path.pop(0); root, name = sys.argv[1:3]; "
    "root in sys.path or sys.path.append(root); "
    "import importlib; sys.exit(importlib.import_module(name).main())"
)


class LineProcess:
    """A Python process running ``main()`` of one of our modules, in a session of its own.

    It does not see the terminal's Ctrl-C, so that the launcher decides what happens then.
    """

    def __init__(self, module: str) -> None:
        self.name = module.rsplit(".", 2)[1] if module.endswith("service") else "fork server"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, _ROOT, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._buffer = b""

    def fileno(self) -> int:
        """For selectors: readable when the process has said something or has ended."""
        return self._stdout.fileno()

    def say(self, message: dict[str, Any]) -> None:
        """Write one line. That the process is gone shows in :meth:`hear`, not here."""
        try:
            self._stdin.write((json.dumps(message) + "\n").encode())
            self._stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines that have arrived, and whether more can follow."""
        data = os.read(self.fileno(), 1 << 20)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines], bool(data)

    def hang_up(self) -> None:
        """Close its input: it ends what it was doing and exits."""
        try:
            self._stdin.close()
        except BrokenPipeError:
            return

    def finish(self, timeout: float) -> int:
        """Wait for its end, kill it when it takes longer; returns the exit code."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._stdout.close()
        return code
