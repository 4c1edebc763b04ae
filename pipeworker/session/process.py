"""The user's process: its program, the modes of torch that it has entered, and its notebook."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import PipeworkerError

_VSCODE = "__vsc_ipynb_file__"
"""The variable of a notebook in which Visual Studio Code puts its path."""
_JUPYTER = "JPY_SESSION_NAME"
"""The environment variable in which a Jupyter server puts the path of a kernel's notebook."""
_CHILD = ("multiprocessing.process", "_bootstrap")


def script_path() -> str:
    """Return the path of the running program or notebook, which is the job's file."""
    if (shell := notebook_shell()) is not None:
        named = shell.user_ns.get(_VSCODE) or os.environ.get(_JUPYTER) or "notebook.ipynb"
        path = Path(str(named))
        return str(path if path.is_absolute() else Path.cwd() / path.name)
    name = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-") else "script"
    return str(Path(name).resolve())


def notebook_shell() -> Any:
    """Return IPython's shell if this process is the kernel of a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython and "ipykernel" in sys.modules else None
    return shell if hasattr(shell, "kernel") else None


def frame_of_child() -> types.FrameType | None:
    """Return the frame of ``multiprocessing`` that runs this thread; None if it is no child of it.

    When the user's function has ended, the frame has the variable `exitcode`.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame and (frame.f_globals.get("__name__"), frame.f_code.co_name) != _CHILD:
        frame = frame.f_back
    return frame


class OpenPipelines:
    """The open pipelines of a notebook's process, which end when nothing refers to them.

    A cell that runs again assigns a new pipeline to the same variable. The earlier one then remains
    in the tracebacks that IPython keeps, so its end cannot wait for the collector of garbage.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watches = False

    def add(self, pipeline: Any, end: Callable[[], None]) -> None:
        """End a pipeline when it is garbage and, in a notebook, when no variable refers to it.

        `end` must not refer to the pipeline.
        """
        weakref.finalize(pipeline, _end_in_main_thread, end).atexit = False
        shell = notebook_shell()
        if shell is None:
            return
        self._found.add(pipeline)
        if not self._watches:
            self._watches = True
            shell.events.register("post_run_cell", lambda *_: self._end_replaced())

    def _end_replaced(self) -> None:
        for reference in [weakref.ref(one) for one in self._found]:
            pipeline = reference()
            if pipeline is not None and not _is_held(pipeline):
                self._found.discard(pipeline)
                try:
                    pipeline.close()
                except PipeworkerError as error:
                    print(f"error: {error}", file=sys.stderr)


OPEN_PIPELINES = OpenPipelines()


def _is_held(value: object) -> bool:
    """Return whether anything refers to a value, besides frames that ran and their variables."""
    found = [one for one in gc.get_referrers(value) if not isinstance(one, types.FrameType)]
    for referrer in found:
        if not isinstance(referrer, dict):
            return True
        others = [one for one in gc.get_referrers(referrer) if one is not found]
        if not all(isinstance(one, types.FrameType) for one in others):
            return True
    return False


def _end_in_main_thread(end: Callable[[], None]) -> None:
    if threading.current_thread() is threading.main_thread():
        end()


@contextmanager
def plain_modes() -> Iterator[None]:
    """Leave the modes that the user's code has entered: the job's numbers depend on none."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        current = torch.accelerator.current_accelerator()
        for device in ("cpu", *([current.type] if current else [])):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
