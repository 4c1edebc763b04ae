"""The hooks of a job that a script passes: rank 0 calls them between steps, in the script's thread.

They are functions and objects of the script's process, which no other process has.
"""

from __future__ import annotations

import contextlib
import sys

from pipeworker.errors import PipeworkerError
from pipeworker.job.file import JobFile
from pipeworker.job.hooks import called_with_records, hooks_of
from pipeworker.session.session import Session
from pipeworker.worker.hooks import Hooks


class ScriptHooks:
    """The hooks of the job of a session's; none on other ranks than 0."""

    def __init__(self, job: JobFile, session: Session) -> None:
        self._session, self._objects = session, called_with_records(job)
        self._is_over = session.rank != 0 or not hooks_of(self._objects)
        self._hooks: Hooks | None = None

    def call_new(self, *, final: bool = False) -> None:
        """Call the hooks with what was recorded since the last call; with all of it if `final`.

        Errors are shown as warnings.
        """
        if self._is_over or not self._session.worker.is_loaded:
            return
        loaded = self._session.worker.loaded
        try:
            if self._hooks is None:
                step = loaded.role.options.resume_step
                self._hooks = Hooks(loaded.run_dir, self._objects, step, _warn, lambda _: None)
            if final:
                self._is_over = True
                self._hooks.finish()
            else:
                self._hooks.call_new()
        except (OSError, PipeworkerError) as error:
            self._is_over = True
            _warn(f"hooks: {error}; no hook is called any more", "")
            if self._hooks is not None:
                self._hooks.close()


def _warn(text: str, details: str) -> None:
    with contextlib.suppress(OSError):  # the stream belongs to the script
        print(f"warning: {text}\n{details}".rstrip(), file=sys.stderr, flush=True)
