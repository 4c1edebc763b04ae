"""The hooks of a job that a script passes: rank 0 calls them between steps, in the script's thread.

They are functions of the script's process, which no other process has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pipeworker.errors import PipeworkerError
from pipeworker.job.file import HOOKS, JobFile
from pipeworker.session.session import Session
from pipeworker.worker.hooks import Hooks


class ScriptHooks:
    """The hooks of the job of a session's; none on other ranks than 0."""

    def __init__(self, job: JobFile, session: Session) -> None:
        self._session = session
        found = {name: getattr(job, name) for name in HOOKS}
        self._functions: Mapping[str, Callable[[Any], Any]] = {
            name: value for name, value in found.items() if value and session.rank == 0
        }
        self._hooks: Hooks | None = None

    def call_new(self, *, final: bool = False) -> None:
        """Call them with what was recorded since the last call; with all that is left if `final`.

        Errors are shown as warnings.
        """
        if not (self._functions and self._session.worker.is_loaded):
            return
        loaded = self._session.worker.loaded
        try:
            if self._hooks is None:
                step = loaded.role.options.resume_step
                self._hooks = Hooks(loaded.run_dir, self._functions, step, _warn, lambda _: None)
            if final:
                self._hooks.finish()
            else:
                self._hooks.call_new()
        except (OSError, PipeworkerError) as error:
            self._functions = {}
            _warn(f"hooks: {error}; no hook is called any more", "")


def _warn(text: str, details: str) -> None:
    with contextlib.suppress(OSError):  # the stream belongs to the script
        print(f"warning: {text}\n{details}".rstrip(), file=sys.stderr, flush=True)
