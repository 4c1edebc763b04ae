"""Errors of the user's code and of pipeworker, distinguished where they are raised.

Every call of the user's code is made inside :func:`user_code`, or calls :func:`blame_user` itself
where a context manager would cost too much. An exception that leaves such a call is the user's. Any
other exception is a defect of pipeworker, and is shown with pipeworker's frames, unless the user's
code has raised it: a signal handler may do so at any moment.
"""

from __future__ import annotations

import os
import traceback
from bdb import BdbQuit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

import pipeworker
from pipeworker.errors import (
    NoTerminalError,
    PeerLost,
    PipeworkerError,
    ReplicasDiffer,
    SkipError,
    SnapshotLost,
    UsageError,
)
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.limits import MOST_STATUSES
from pipeworker.facts.position import Phase, Position
from pipeworker.worker.stray_children import end_stray_child

_NOT_SHOWN = (f"{Path(pipeworker.__file__).parent}{os.sep}", "<frozen importlib")
_MAX_CHARACTERS = 20_000
_NO_MEMORY = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of torch's RuntimeErrors for a host without memory, and for a device that lacks it for
other things than tensors: several stages may share one."""
_USE_LESS_MEMORY = (
    "\n  out of memory: {}use more --microbatches, to make each smaller, --recompute always or "
    "offload, to keep less of them, or more --stages or another --balance, to give this stage "
    "fewer layers"
)
_STACK = "Stack (most recent call last):"
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Parts of RuntimeErrors, of Python and of torch, for a thread that the system refuses."""
_LOADER_LOST = "DataLoader worker (pid"
"""Part of torch's RuntimeErrors for a process of a loader that is gone. A signal handler raises one
of them wherever the main thread is, in data(), in a layer or in pipeworker's own code."""
_DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "busy or unavailable",
)
"""Parts of CUDA's errors for a device that has failed, whatever the process has asked of it."""
_USE_FEWER_THREADS = (
    "; the system grants no more threads or processes: raise the limit (ulimit -u, pids.max of the "
    "cgroup) or start fewer workers on this host"
)
_NO_HOOKS = "saved tensor hooks"
"""Part of torch's RuntimeErrors for hooks on saved tensors inside ``torch.func``."""
_ADVICE = {
    "does not have a deterministic implementation": (
        "\n  --deterministic: use another operation in the layer, or leave out --deterministic "
        "(docs/networks.md explains its purpose)"
    ),
    _NO_HOOKS: (
        "\n  --recompute offload: the layer does not support the hooks that move saved tensors; "
        "choose another mode"
    ),
    "modified by an inplace operation": (
        "\n  a change in place: if a layer changes its input, and an earlier layer needs that in "
        "backward, use inplace=False, and x = x + y for x += y; several micro-batches run forward "
        "before the first one runs backward, so change weights in the optimizer's step() or in "
        "before_update(), and use what a hook on the backward changes in no forward; for a buffer "
        "that only some forwards change, use --recompute always"
    ),
    "Trying to backward through the graph a second time": (
        "\n  a graph that has run backward: call backward() neither in loss(output, target) nor in "
        "a layer, because a step does so, and detach what a layer keeps for its next forward"
    ),
    "Expected all tensors to be on the same device": (
        "\n  a tensor on another device: make it on the device of the layer's input "
        "(device=x.device), or register it as a parameter or a buffer of the layer; a layer cannot "
        "use a parameter of another one (docs/networks.md explains how layers share one)"
    ),
    "Expected more than 1 value per channel when training": (
        "\n  batch norm: this micro-batch is too small; use fewer --microbatches or larger "
        "mini-batches, and leave out a small last one (drop_last=True)"
    ),
}
"""Advice by a part of torch's error: for an operation under ``use_deterministic_algorithms``, for
hooks inside ``torch.func``, for tensors that graphs have saved, for graphs that are gone, for
devices and batch norm."""


class UserCodeError(Exception):
    """The user's code raised an exception, `error`.

    Attributes:
        early: whether loading or building failed, a mistake in the job file, rather than a step.
    """

    def __init__(self, name: str, error: BaseException, *, early: bool, note: str) -> None:
        super().__init__(f"{name} {raised(error)}{note and f' ({note})'}")
        self.early = early
        self.error = error


class JobExit(UserCodeError):
    """The job file ended its process while it was loaded, as a parser of arguments does.

    Attributes:
        message: its output and its reason, for the user.
    """

    def __init__(self, name: str, error: SystemExit) -> None:
        super().__init__(name, error, early=True, note="")
        code = error.code
        is_status = code is None or isinstance(code, int)
        self.status = int(code or 0) % MOST_STATUSES if is_status else 1
        self.message = "" if is_status else str(code)
        self._name = name

    def text(self) -> str:
        """Return the message for the user."""
        return self.message or (
            f"{self._name} exited with status {self.status} without a message; remove its "
            "sys.exit(), or have it print the reason"
        )


def blame_user(name: str, error: BaseException, *, early: bool = False, note: str = "") -> NoReturn:
    """Raise the error of user code as a UserCodeError, and one of pipeworker as it is.

    `name` is that of the code: ``layer 3 (Linear)``, ``data()``. `early`: it loads or builds.

    Raises:
        UserCodeError: always, with these exceptions.
        JobExit: the job file ended its process.
        KeyboardInterrupt: from the keyboard, or from leaving a debugger.
        PipeworkerError: `error` is one already.
    """
    if isinstance(error, (PipeworkerError, UserCodeError, KeyboardInterrupt, GeneratorExit)):
        raise error
    if isinstance(error, SystemExit) and early:
        raise JobExit(name, error) from error
    if isinstance(error, BdbQuit):  # the user has left the debugger
        raise KeyboardInterrupt from error
    raise UserCodeError(name, error, early=early, note=note) from error


@contextmanager
def user_code(name: str, *, early: bool = False) -> Iterator[None]:
    """Blame the user for exceptions inside the context; see :func:`blame_user`.

    A child that the user's code has forked inside ends where it leaves the context.
    """
    try:
        yield
    except BaseException as error:
        blame_user(name, error, early=early)
    finally:
        end_stray_child()


def reject_none(value: Any, source: str, name: str, error: BaseException) -> None:
    """Blame the layer `source` that returned `value`, if that is None, for the error of its user.

    Raises:
        UsageError: `value` is None.
    """
    if value is None and isinstance(error, Exception):
        raise UsageError(
            f"{source}: returned None, on which {name} raised {text(error)}; return the layer's "
            "output from its forward"
        ) from None


def kind_of(layer: nn.Module) -> str:
    """Return what messages call a layer, besides its index: its class; of a cut module, its name.

    Such a layer has the attribute ``pipeworker_kind``.
    """
    return str(getattr(layer, "pipeworker_kind", type(layer).__name__))


def layer(index: int, kind: str) -> str:
    """Return the name of a layer for errors: ``layer 3 (Linear)``."""
    return f"layer {index} ({kind})" if kind else f"layer {index}"


def failure_of(
    error: BaseException,
    rank: int,
    position: Position,
    layer_class: str = "",
    stage: str = "",
    keeps: str = "",
    transient: tuple[type[BaseException], ...] = (),
    modules: Iterable[ModuleType] = (),
) -> Failure:
    """Return the failure that an exception means, with the class and the stage of its position.

    `keeps` is the memory that the plan expects, for the error of a worker without memory.
    `transient` are the user's exceptions that are worth another try; `modules` has the user's code.
    """
    known = isinstance(error, (PipeworkerError, UserCodeError, KeyboardInterrupt))
    if not known and _is_raised_in(error, modules):
        error = UserCodeError("the job file", error, early=False, note="")
    cause, message, shown, status = Cause.USER, message_of(error), "", 1
    use_less = _USE_LESS_MEMORY.format(keeps and f"{keeps}; ")
    match error:
        case JobExit():
            cause, message, status = Cause.EXIT, _shorten(error.text()), error.status
        case UserCodeError():
            cause = Cause.USAGE if error.early else Cause.USER
            advice = use_less if is_out_of_memory(error) else ""
            if isinstance(error.error, (RuntimeError, ValueError)):
                reason = message_of(error.error)
                advice = next((_ADVICE[part] for part in _ADVICE if part in reason), advice)
            message, shown = f"{error}{advice}", user_traceback(error.error)
        case PeerLost():
            cause = Cause.PEER
        case SnapshotLost():
            cause = Cause.SNAPSHOT
        case ReplicasDiffer():
            cause = Cause.DIVERGED
        case UsageError() if not (isinstance(error, SkipError) and error.in_step):
            cause = Cause.USAGE
        case PipeworkerError():
            pass
        case KeyboardInterrupt():
            message, shown = "KeyboardInterrupt", user_traceback(error)
        case _ if is_out_of_memory(error):
            message = f"{text(error)}{use_less}"
        case _ if _is_out_of_threads(error) or isinstance(error, torch.AcceleratorError):
            message = text(error)  # of a layer's work, which the device has done later
        case _:
            cause, message = Cause.INTERNAL, f"a defect in pipeworker: {text(error)}"
            shown = "".join(traceback.format_exception(error))
    if isinstance(error, UserCodeError) and isinstance(error.error, transient):
        cause = Cause.TRANSIENT
    origin = error.error if isinstance(error, UserCodeError) else error
    if _is_out_of_threads(origin):
        cause, message = Cause.LOST, f"{message}{_USE_FEWER_THREADS}"  # others may end meanwhile
    elif _is_loader_lost(origin):
        cause, message, shown = Cause.LOST, f"a process of data() is gone: {text(origin)}", ""
    elif _is_device_lost(origin):
        cause, message, shown = Cause.LOST, f"its device has failed: {text(origin)}", ""
    is_making_optimizer = position.phase is Phase.UPDATE and position.step < 0
    lacks = (cause is Cause.USAGE and is_making_optimizer) or (
        isinstance(error, NoTerminalError) and max(position.step, position.layer) >= 0
    )
    message, shown = _shorten(message), _shorten(shown)
    return Failure(cause, message, rank, position, layer_class, shown, stage, status, lacks)


def _is_raised_in(error: BaseException, modules: Iterable[ModuleType]) -> bool:
    """Return whether code of modules has raised an exception: a signal handler may, anywhere."""
    *_, last = [None, *(frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))]
    return any(vars(module) is last for module in modules)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was no memory, on the device or the host."""
    if isinstance(error, UserCodeError):
        error = error.error
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(part in message_of(error) for part in _NO_MEMORY)
    )


def rejects_hooks(error: UserCodeError) -> bool:
    """Return whether code raised because there were hooks on saved tensors around it."""
    return isinstance(error.error, RuntimeError) and _NO_HOOKS in message_of(error.error)


def _is_out_of_threads(error: BaseException) -> bool:
    """Return whether the system has refused a thread, or a process (BlockingIOError of a fork)."""
    return isinstance(error, BlockingIOError) or (
        isinstance(error, RuntimeError) and any(part in message_of(error) for part in _NO_THREAD)
    )


def _is_loader_lost(error: BaseException) -> bool:
    """Return whether a process of a ``DataLoader`` was killed or has exited."""
    return isinstance(error, RuntimeError) and _LOADER_LOST in message_of(error)


def _is_device_lost(error: BaseException) -> bool:
    """Return whether an accelerator has failed, and not what it was asked to do."""
    return isinstance(error, torch.AcceleratorError) and any(
        part in message_of(error) for part in _DEVICE_FAULTS
    )


def problem(error: BaseException) -> str:
    """Return the message of an error that names its code, else the class and the message."""
    named = isinstance(error, (PipeworkerError, UserCodeError))
    return _shorten(str(error)) if named else text(error)


def text(error: BaseException) -> str:
    """Return the class and message of an exception: ``ValueError: no``."""
    return _shorten(f"{type(error).__name__}: {message_of(error)}".rstrip(": "))


def message_of(error: BaseException) -> str:
    """Return the message of a user's exception, whose ``__str__`` may raise, as Python shows it."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def raised(error: BaseException) -> str:
    """Return ``raised ValueError: no``, or ``called sys.exit(3)``."""
    if isinstance(error, SystemExit):
        return _shorten(f"called sys.exit({'' if error.code is None else repr(error.code)})")
    return f"raised {text(error)}"


def _shorten(text: str) -> str:
    """Shorten a message that contains a tensor or a whole file, to fit a frame and a screen."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def user_stack(frame: FrameType | None) -> str:
    """Return the stack of what pipeworker has called, without the frames of pipeworker.

    It reads no source file: the thread may be stuck because the files cannot be read.
    """
    frames = [*(traceback.walk_stack(frame) if frame else ())]
    while frames and not frames[-1][0].f_code.co_filename.startswith(_NOT_SHOWN[0]):
        frames.pop()  # the interpreter's start
    shown = [
        f'  File "{one.f_code.co_filename}", line {line}, in {one.f_code.co_name}'
        for one, line in frames
        if not one.f_code.co_filename.startswith(_NOT_SHOWN)
    ]
    return _shorten("\n".join((*shown, _STACK)[::-1])) if shown else ""


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of pipeworker and of the import machinery."""
    shown = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    chain = [shown]
    while chain:
        one = chain.pop()
        if id(one) not in seen:
            seen.add(id(one))
            frames = [frame for frame in one.stack if not frame.filename.startswith(_NOT_SHOWN)]
            one.stack = traceback.StackSummary.from_list(frames)
            chain += filter(None, (one.__cause__, one.__context__))
    return "".join(shown.format())
