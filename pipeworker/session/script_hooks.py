"""What a script's job passes records to: rank 0 calls it between steps, in the script's thread.

Functions and objects of the script's process are there, which no other process has; and so are the
loggers of its options.
"""

from __future__ import annotations

import contextlib
import sys

from pipeworker.errors import PipeworkerError
from pipeworker.job.file import JobFile, hooks_of
from pipeworker.session.session import Session
from pipeworker.worker.hooks import Hooks, loggers_of


class ScriptHooks:
    """The hooks of the job of a session's; none on other ranks than 0."""

    def __init__(self, job: JobFile, session: Session) -> None:
        self._job, self._session = job, session
        self._has_hooks = bool(hooks_of(job))
        self._is_over = session.rank != 0
        self._hooks: Hooks | None = None

    def call_new(self, *, final: bool = False) -> None:
        """Call them with what was recorded since the last call; with all that is left if `final`.

        Errors are shown as warnings.
        """
        if self._is_over or not self._session.worker.is_loaded:
            return
        loaded = self._session.worker.loaded
        options = loaded.role.options
        try:
            if self._hooks is None:
                if not self._has_hooks and not options.loggers:
                    return
                loggers, step = loggers_of(options, loaded.run_dir, _warn), options.resume_step
                self._hooks = Hooks(loaded.run_dir, self._job, loggers, step, _warn, lambda _: None)
            if final:
                self._is_over = True
                self._hooks.finish()
            else:
                self._hooks.call_new()
        except (OSError, PipeworkerError) as error:
            self._is_over = True
            _warn(f"hooks: {error}; no hook is called any more", "")


def _warn(text: str, details: str) -> None:
    with contextlib.suppress(OSError):  # the stream belongs to the script
        print(f"warning: {text}\n{details}".rstrip(), file=sys.stderr, flush=True)
