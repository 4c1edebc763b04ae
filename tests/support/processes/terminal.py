"""A job on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from typing import Any

from support.real_jobs.jobs import COMMAND, Jobs
from support.real_jobs.sources import JOB

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``pipeworker launch WORDS job.py`` on a pseudo-terminal."""

    def __init__(self, jobs: Jobs, *words: str, source: str = JOB, columns: int = 80) -> None:
        job_file = jobs.write(source)
        self.path = jobs.folder / "run-terminal"
        line = [*COMMAND[1:], "launch", "--run-dir", str(self.path), *words, str(job_file)]
        self._text = ""
        self._master: int | None = None
        self._master, child_end = pty.openpty()
        fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm"}  # the tests may run in one that shows no bar
        try:
            self._process = jobs.python(*line, env=env, terminal=child_end)
        finally:
            os.close(child_end)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        self.hang_up()

    def read(self) -> str:
        """Return everything written so far."""
        while self._master is not None and select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # no process has the terminal open
                break
            self._text += data.decode(errors="replace")
        return self._text

    @property
    def text(self) -> str:
        """Return everything written so far, without escape sequences."""
        return _CONTROL.sub("", self.read())

    @property
    def shown(self) -> list[str]:
        """Return the lines that a terminal of unlimited size would show now."""
        lines, row, column = [""], 0, 0
        for found in re.finditer(r"\x1b\[([?0-9;]*)([A-Za-z])|[^\x1b]", self.read()):
            number, letter = found[1], found[2]
            if letter == "A":
                row -= int(number or 1)
            elif letter == "K":
                lines[row] = ""
            elif found[0] == "\r":
                column = 0
            elif found[0] == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif letter is None:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + found[0] + line[column + 1 :]
                column += 1
        return lines

    def type(self, keys: str) -> None:
        assert self._master is not None
        os.write(self._master, keys.encode())

    def hang_up(self) -> None:
        if self._master is not None:
            os.close(self._master)
            self._master = None

    def wait(self, seconds: float) -> int:
        """Wait for the end; return the exit status."""
        deadline = time.monotonic() + seconds
        while (status := self._process.poll()) is None:
            assert time.monotonic() < deadline, f"still running after {seconds:g} s"
            self.read()
            time.sleep(0.02)
        self.read()
        return status
