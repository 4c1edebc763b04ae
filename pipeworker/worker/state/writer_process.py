"""The process that writes snapshot memories to disk, at a worker's request."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeworker.environment import timings
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.host.lifetime import command, is_stopped
from pipeworker.host.suspend_clock import SuspendAwareClock

_POLL_SECONDS = 1.0
"""Seconds between checks of whether the process is stopped."""


class WriterProcess:
    """A process that writes the files of memories whose descriptors, `handles`, it inherits."""

    def __init__(self, handles: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            command("pipeworker.record.checkpoint.snapshot_memory"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=handles,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.kill = self._process.kill  # also while it writes

    def write(
        self, handles: Sequence[int], folder: Path, names: Sequence[str]
    ) -> tuple[tuple[CheckpointFile, ...], str]:
        """Write the files of a memory; return them, and why they cannot be written, or "".

        Raises:
            BrokenPipeError: the process is gone.
        """
        request = json.dumps([str(folder), list(handles), list(names)])
        self._stdin.write(request.encode() + b"\n")
        self._stdin.flush()
        self._wait()
        answer = self._stdout.readline()
        if not answer.endswith(b"\n"):
            raise BrokenPipeError
        files, error = json.loads(answer)
        return tuple(CheckpointFile(*file) for file in files), error

    def _wait(self) -> None:
        """Wait for the answer, however slow the disk is; kill the process if it stays stopped."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        clock = SuspendAwareClock(2 * _POLL_SECONDS)
        since = clock.now()
        while not poll.poll(1000 * _POLL_SECONDS):
            now = clock.now()
            if not is_stopped(self._process.pid):
                since = now
            elif now - since > timings().reach:
                self.kill()

    def close(self) -> None:
        """End the process, which does not write; kill it if it does not end."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(timings().linger)
        except subprocess.TimeoutExpired:  # it is stopped
            self.kill()
            self._process.wait()
        self._stdout.close()
