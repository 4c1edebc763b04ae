"""The job file: run and checked. Each mistake has one clear message."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import takewhile
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.job import signatures
from pipeworker.job.options import Options

_PACKAGE = "pipeworker_job"
REQUIRED = ("model", "loss", "optimizer", "data")
HOOKS = ("on_step", "on_evaluation", "on_checkpoint")
"""Names of functions that are called with what is recorded, outside of the workers."""
_MAY_BE_NONE = ("scheduler", "before_update", "metrics", "evaluation", "tokens", *HOOKS)
_OPTIONAL = (*_MAY_BE_NONE, "scheduler_interval", "tied", "names", "transient", "callbacks")
_INTERVALS = ("step", "epoch")
_NEARLY = 0.87
"""The similarity (difflib's ratio) from which a name counts as a misspelling of another."""
_MOST_FILES = 1 << 10
"""Source files to compare between hosts; packages with more were not copied by hand."""
_DIGEST_LENGTH = 16
_SPAWNED = str(Path(__file__).with_name("spawned"))
"""The folder of the module that has the name of `_PACKAGE` in a spawned process."""
_NEVER_OF_A_USER = ("torch", "pipeworker")
"""The packages that this process imports at any time, in addition to what the job file does."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """The names that a job file defines, checked to be of the right kind.

    Attributes:
        where: what messages call the source of the names.
        misspelled: pairs of a name that is defined and the optional name that it resembles.
    """

    model: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    data: Any = None
    scheduler: Callable[..., Any] | None = None
    scheduler_interval: str = "step"
    before_update: Callable[[list[nn.Parameter]], Any] | None = None
    evaluation: Any = None
    metrics: Callable[[Any, Any], Any] | None = None
    tied: Sequence[Sequence[str]] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    transient: tuple[type[BaseException], ...] = ()
    tokens: Callable[[Any], Any] | None = None
    on_step: Callable[[dict[str, Any]], Any] | None = None
    on_evaluation: Callable[[dict[str, Any]], Any] | None = None
    on_checkpoint: Callable[[Path], Any] | None = None
    callbacks: Sequence[Any] = ()
    where: str = "the job"
    misspelled: tuple[tuple[str, str], ...] = ()

    @property
    def steps_by_epoch(self) -> bool:
        """Whether the learning rate depends on where epochs end."""
        return self.scheduler is not None and self.scheduler_interval == "epoch"


def load(path: Path, arguments: tuple[str, ...]) -> JobFile:
    """Run a job file as a module, with its folder first on the import path.

    ``import neighbour`` and ``from . import neighbour`` both find modules beside the file, even if
    one is named like a top-level module of pipeworker's repository. Of a link they also find those
    beside its target, as Python does. A process that ``multiprocessing`` spawns finds the file too.
    Whatever the file raises, a SyntaxError among them, is raised.
    """
    if not path.is_file():
        raise UsageError(f"job file {path}: does not exist; give the path of a Python file")
    if path.suffix != ".py":
        raise UsageError(f"job file {path}: not a Python file; its name must end in .py")
    _forget_own_modules()
    folders = [*map(str, _folders(path))]
    sys.path[:0] = folders
    if _SPAWNED not in sys.path:
        sys.path.append(_SPAWNED)
    sys.argv = [str(path), *arguments]
    package = ModuleType(_PACKAGE)
    package.__path__ = folders
    name = f"{_PACKAGE}.{path.stem.replace('.', '_')}"
    for old in (_PACKAGE, name):  # of another job: the new ones must be the last modules
        sys.modules.pop(old, None)
    sys.modules[_PACKAGE] = package
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return check(module, f"job file {path}")


def _folders(path: Path) -> list[Path]:
    """Return the folder of a job file, and of a link that of its target."""
    return [*dict.fromkeys((path.parent, path.resolve().parent))]


def has_begun_to_load() -> bool:
    """Return whether this process has begun to load a job file."""
    return _PACKAGE in sys.modules


class _FromSource(SourceFileLoader):
    """Compiles the source: Python's cached bytecode may be of an equally large, recent file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _forget_own_modules() -> None:
    """Forget the repository's ``cli`` and ``launcher``, so that a user's own ones are found.

    A forked process reads as few names of modules as it can: each read copies a page of memory.
    """
    for name in ("cli", "launcher"):
        _forget(name)


def _forget(name: str) -> None:
    module = sys.modules.pop(name, None)
    if hasattr(module, "__path__"):  # a package, which has its modules as attributes
        for own in [f"{name}.{own}" for own in vars(module)]:
            if own in sys.modules:
                _forget(own)


def modules() -> list[ModuleType]:
    """Return what was imported since :func:`load` began, without torch's and pipeworker's own."""
    names = list(takewhile(_PACKAGE.__ne__, reversed(sys.modules)))  # the newest is the last
    return user_modules(reversed(names))


def user_modules(names: Iterable[str]) -> list[ModuleType]:
    """Return the imported modules with these names, without torch's and pipeworker's own."""
    found = [sys.modules.get(n) for n in names if n.partition(".")[0] not in _NEVER_OF_A_USER]
    return [module for module in found if isinstance(module, ModuleType)]


def check(module: Any, where: str, required: Sequence[str] = REQUIRED) -> JobFile:
    """Check the names of a job, given as attributes of `module`, and return them."""
    found = {n: getattr(module, n) for n in (*REQUIRED, *_OPTIONAL) if hasattr(module, n)}
    if isinstance(module, ModuleType) and not callable(found.get("tokens")):  # a variable
        found.pop("tokens", None)
    if missing := [name for name in required if name not in found]:
        plural = "names" if len(missing) > 1 else "name"
        own = [n for n in dir(module) if not isinstance(getattr(module, n, None), ModuleType)]
        similar = [match for n in missing for match in get_close_matches(n, own, 1)]
        hint = f"; {similar[0]} is not one of them" if similar else ""
        raise UsageError(
            f"{where}: lacks the {plural} {', '.join(missing)}; define "
            f"{', '.join(required[:-1])} and {required[-1]}{hint}"
        )
    for name, value in found.items():
        if value is None and name in _MAY_BE_NONE:
            continue
        if right := _right_kind(name, value):
            raise UsageError(f"{where}: {name} is {a_type(value)}; make it {right}")
        if name in signatures.NAMES and (error := signatures.job_error(name, value)):
            raise UsageError(f"{where}: {name} {error}")
    _check_callbacks(found.get("callbacks", ()), where)
    interval = found.get("scheduler_interval", "step")
    if interval not in _INTERVALS:
        raise UsageError(
            f"{where}: scheduler_interval is {interval!r}; it must be "
            f"{' or '.join(map(repr, _INTERVALS))}"
        )
    kinds = found.get("transient", ())
    found["transient"] = kinds = (*kinds,) if isinstance(kinds, (list, tuple)) else (kinds,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise UsageError(
                f"{where}: transient has {a_type(kind)}; make it exception types, in a tuple"
            )
    return JobFile(**found, where=where, misspelled=_misspelled(module))


def _right_kind(name: str, value: Any) -> str:
    """Return what the value of a name must be, or "" if it is."""
    match name:
        case "model":
            fits = isinstance(value, (nn.Module, list, tuple)) or is_function(value)
            right = "an nn.Module, a list of layers, or a function returning one"
        case "data" | "evaluation":
            fits = any(hasattr(value, what) for what in ("__call__", "__iter__", "__getitem__"))
            right = "an iterable of (input, target) mini-batches, or a function returning one"
        case "tied":
            fits, right = isinstance(value, (list, tuple)), "a list of tuples of parameter names"
        case "callbacks":
            fits, right = isinstance(value, (list, tuple)), "a list of objects"
        case "names":
            fits = isinstance(value, dict) and all(
                isinstance(part, str) and all(part.split("."))
                for pair in value.items()
                for part in pair
            )
            right = "a dict of names in the model and the names that they have in files"
        case "scheduler_interval" | "transient":
            fits, right = True, ""
        case _:
            made = name in ("optimizer", "scheduler") and hasattr(value, "step")
            which = " that makes it on each stage" if made else ""
            fits, right = callable(value), f"a function{which}, {signatures.pattern(name)}"
    return "" if fits else right


def _check_callbacks(callbacks: Sequence[Any], where: str) -> None:
    for place, one in enumerate(callbacks):
        methods = [getattr(one, name) for name in HOOKS if hasattr(one, name)]
        if isinstance(one, type) or not methods or not all(map(callable, methods)):
            raise UsageError(
                f"{where}: callbacks[{place}] is {a_type(one)}; make it an object with a method "
                f"{', '.join(HOOKS[:-1])} or {HOOKS[-1]}"
            )


def _misspelled(module: Any) -> tuple[tuple[str, str], ...]:
    """Return the names of a module that resemble an optional name it does not define."""
    defined = [name for name in vars(module) if name not in (*REQUIRED, *_OPTIONAL)]
    # "token" is a name of its own.
    missing = [name for name in _OPTIONAL if name != "tokens" and not hasattr(module, name)]
    found = [(get_close_matches(name, defined, 1, _NEARLY), name) for name in missing]
    return tuple((match, name) for matches, name in found for match in matches)


def is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def notes(job: JobFile, options: Options) -> tuple[str, ...]:
    """Return notes on what may be a mistake, each a sentence."""
    loss: Any = job.loss
    if isinstance(loss, partial):
        made, how = loss.func, loss.keywords.get("reduction")
    else:
        made, how = type(loss), getattr(loss, "reduction", None)
    is_torchs = str(getattr(made, "__module__", "")).startswith("torch.")
    found = []
    if is_torchs and how == "sum" and options.microbatches > 1:
        found.append(
            'loss is a sum, reduction="sum", and a step takes the mean over its micro-batches: the '
            "gradients depend on --microbatches; use a mean, or a function that returns the pair "
            "(sum, count)"
        )
    if ":" not in options.best and not options.best.endswith("loss"):
        found.append(
            f"--best {options.best}: the least counts as the best; write max:{options.best} if "
            f"more is better, or min:{options.best} without this note"
        )
    if options.own_loop:
        return tuple(found)
    found += [f"{one} in {job.where} is not used: is {name} meant?" for one, name in job.misspelled]
    when = "--evaluate-every N runs it after every N steps"
    if options.evaluate_first or options.evaluate_every:
        return tuple(found)
    if job.evaluation is not None:
        found.append(f"evaluation() is defined, and not used: {when}")
    elif job.metrics is not None:
        found.append(f"metrics() is defined, and not used: it is for evaluation(), and {when}")
    return tuple(found)


def source_digests(path: Path, modules: Iterable[ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield the path and a digest of the job file, and of the modules that lie beside it."""
    # Not an attribute of the module: a lazy one would import what it stands for.
    files = [vars(module).get("__file__") for module in modules]
    beside = [Path(file) for file in files if isinstance(file, str) and file.endswith(".py")]
    found = {path: path.name}
    for folder in _folders(path):
        for file in beside:
            if file.is_relative_to(folder):
                found.setdefault(file, str(file.relative_to(folder)))
    for source, name in [*found.items()][:_MOST_FILES]:
        try:
            data = source.read_bytes()
        except OSError:
            continue  # generated by the program, or removed since
        yield name, hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]
