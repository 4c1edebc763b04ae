"""A forked process that behaves as a fresh interpreter with the same command line."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from pipeworker.host.lifetime import die_with_parent

MAXIMUM = 1 << 17
"""The largest request to the server, in bytes."""
PRELOAD = "PIPEWORKER_TESTS_PRELOAD"
"""The variable with a module that forked processes, and those they start, import first."""
COLD_RANKS = "PIPEWORKER_TESTS_COLD_RANKS"
"""The variable that has torchrun start its ranks as separate interpreters."""
SERVER = "PIPEWORKER_TESTS_SERVER"
"""The variable with the name of the server that forks what an interpreter starts."""
NAMESPACE = "PIPEWORKER_TESTS_NAMESPACE"
"""The variable with the network namespace of an interpreter, a colon, and the server's pid."""
_TORCHRUN = "torch.distributed.run"
_NODE = ["-m", "pipeworker", "node"]
_PR_SET_NAME = 15
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that every Python interpreter ignores."""


@dataclass(frozen=True)
class Request:
    """The command line that a forked process runs, and its surroundings.

    Attributes:
        words: a command line of the interpreter's, without its own name.
        name: of the process, as the kernel shows it.
        streams: standard input, output and error.
        parent: the server.
        namespace: of the network, to be in.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]
    name: str
    streams: tuple[int, ...]
    parent: int
    namespace: str = ""


def become(request: Request, server: bytes) -> NoReturn:
    """Run the command line to the end of the process.

    Args:
        server: its address, for the processes that this one starts.
    """
    status = 1
    try:
        _take_over(request)
        run = _program(request.words)
        fork_line_processes(server)
        agent = request.words[:2] == ["-m", _TORCHRUN] or request.words[:3] == _NODE
        if agent and COLD_RANKS not in os.environ:
            _fork_ranks(server)
        if preload := os.environ.get(PRELOAD):
            importlib.import_module(preload)
        for name in list(_loaded("support")):
            del sys.modules[name]
        status = _status_of(run)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _loaded(name: str) -> Iterator[str]:
    """Yield the names of a package and of its modules that are loaded.

    To look at the names of all modules would copy a thousand pages of the server's memory.
    """
    yield name
    for own in vars(sys.modules[name]):
        if f"{name}.{own}" in sys.modules:
            yield from _loaded(f"{name}.{own}")


def _take_over(request: Request) -> None:
    """Detach the process from the server."""
    die_with_parent(request.parent)
    if request.namespace:
        from support.processes import forked

        forked.enter(request.namespace)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request.name.encode())
    for target, descriptor in enumerate(request.streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    _attach_terminal()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the server handles it
    if [*os.environ] != [*request.environment]:
        os.environ.clear()
    for name, value in request.environment.items():
        if os.environ.get(name) != value:  # to set one copies a page of the server's memory
            os.environ[name] = value
    os.chdir(request.folder)
    tempfile.tempdir = None
    if np := sys.modules.get("numpy"):
        np.random.seed()  # Python's own generator does so by itself
    gc.enable()


def reset_signals() -> None:
    """Have the handlers and the mask of signals that a fresh interpreter has."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # some are the C library's own
            ignored = number in _IGNORED
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def take_terminal() -> None:
    """Start a session whose terminal is standard input, if that is a free terminal."""
    os.setsid()
    _attach_terminal()


def _attach_terminal() -> None:
    if os.isatty(0):
        with contextlib.suppress(PermissionError):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _program(words: list[str]) -> Callable[[], Any]:
    """Return what a command line runs, after setting arguments, import path and ``__main__``."""
    unbuffered = words[0] == "-u"
    words = words[unbuffered:]
    with contextlib.suppress(OSError):  # the server's was made for another kind of file
        raw = os.fdopen(1, "wb", buffering=0, closefd=False)
        raw.name = "<stdout>"
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(raw, encoding, errors)
        sys.stdout.mode = "w"  # type: ignore[misc]
    for stream in (sys.stdout, sys.stderr):
        through = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
        stream.reconfigure(write_through=through)  # type: ignore[union-attr]
    main = ModuleType("__main__")
    rest = sys.path[1:]
    what = words[0]
    if what == "-m":
        sys.argv[:] = words[1:]
        sys.path[:] = [str(Path.cwd()), *rest]
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    if what == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[:] = ["", *rest]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        sys.path[:] = [str(Path(what).resolve().parent), *rest]
        main.__file__ = str(Path(what).absolute())
        code = compile(Path(what).read_bytes(), main.__file__, "exec")
    sys.modules["__main__"] = main
    return lambda: exec(code, vars(main))


def fork_line_processes(server: bytes) -> None:
    """Have the server also fork the interpreters that this process starts with our modules.

    Args:
        server: its address.
    """
    from pipeworker.host import line_process
    from support.processes import forked

    def start(command: Sequence[str], **options: Any) -> Any:
        if command[0] != sys.executable:  # ssh or srun, which carries the pipes of another host
            return subprocess.Popen(command, **options)
        assert options.pop("start_new_session")
        return forked.Forked(server, list(command), bound=False, text=False, **options)

    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    vars(line_process)["subprocess"] = replaced


def _fork_ranks(server: bytes) -> None:
    """Have the server fork what torchrun starts; only the parent differs."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from support.processes import forked

    def start(args: tuple[str, ...], **options: Any) -> forked.Forked:
        assert options.pop("start_new_session")
        return forked.Forked(server, list(args), bound=False, **options)

    vars(subprocess_handler)["Popen"] = start


def _status_of(run: Callable[[], Any]) -> int:
    """Run a program and an interpreter's exit handlers; return the exit status."""
    status = 0
    try:
        run()
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        status = 1
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.last_exc = sys.last_value = error  # type: ignore[attr-defined, unused-ignore]
        sys.last_type, sys.last_traceback = type(error), error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {sys.stdout!r}", file=sys.stderr)
        traceback.print_exception(error.with_traceback(None))
        status = 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF
