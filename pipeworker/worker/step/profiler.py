"""Profiles of single steps by torch's profiler, a file for each worker."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeworker.host import streams
from pipeworker.record.files.atomic_file import temporary_path
from pipeworker.record.files.located import located
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import RunStep, Update

_DEVICES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class StepProfiler:
    """Profiles the steps from the `first` to the `last`, with their updates.

    The file has Chrome's trace format, and names the worker and the steps that it has: a worker
    that replaces a lost one, or resumes the run, profiles only what has no file yet.

    Args:
        folder: the folder of the files, which need not exist.
        label: called with whether actions are to be labelled.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        steps: tuple[int, int],
        device: torch.device,
        label: Callable[[bool], None],
    ) -> None:
        self._folder, self._name, self._label = folder, f"worker-{rank}-steps-", label
        self._first, self._last = steps
        self._activities = [ProfilerActivity.CPU]
        if device.type in _DEVICES:
            self._activities.append(_DEVICES[device.type])
        self._profile: Any = None
        self._began = self._ended = 0
        with profile(activities=self._activities):  # the first one imports a part of torch
            pass

    def advance(self, message: Advance) -> None:
        """Begin before the first step, and end after the last one's update, which was applied."""
        if self._profile is not None and isinstance(message.update, Update):
            self._ended = message.update.step
            if self._ended >= self._last:
                self.end()
        if self._profile is None and isinstance(message.next, RunStep):
            step = message.next.step
            written = self._folder.glob(f"{self._name}*-{self._last}.json.gz")
            if self._first <= step <= self._last and not any(written):
                self._began = step
                self._label(True)
                self._profile = profile(activities=self._activities)
                self._profile.start()

    def end(self) -> None:
        """End the profile, and write it if it has a whole step. An error is noted in the log."""
        if self._profile is None:
            return
        ended, self._profile = self._profile, None
        self._label(False)
        ended.stop()
        if self._ended < self._began:
            return
        path = self._folder / f"{self._name}{self._began}-{self._ended}.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            with temporary_path(path) as plain, temporary_path(path) as packed:
                ended.export_chrome_trace(str(plain))  # it would pack a file in a folder for all
                with plain.open("rb") as source, gzip.open(packed, "xb") as target:
                    shutil.copyfileobj(source, target)
                packed.replace(path)
        except (OSError, RuntimeError) as error:
            streams.note(f"warning: --profile: cannot write {located(path)}: {error}")


def labelled(handle: Callable[[int], Any], name: str) -> Callable[[int], Any]:
    """Return the handler of an action that profiles show under a name."""

    def run(microbatch: int) -> None:
        with record_function(name):
            handle(microbatch)

    return run
