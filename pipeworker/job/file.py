"""The job file: found, run and checked. What is wrong in it gets one clear message."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job import calls
from pipeworker.job.options import Options

_PACKAGE = "pipeworker_job"
REQUIRED = ("model", "loss", "optimizer", "data")
_OPTIONAL_FUNCTIONS = ("scheduler", "before_update", "metrics")
_OPTIONAL = (*_OPTIONAL_FUNCTIONS, "scheduler_interval", "evaluation", "tied", "transient")
_INTERVALS = ("step", "epoch")
_NEARLY = 0.87
"""How alike two names are that may be one, as difflib has it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The names of a job file, checked to be of the right kind.

    Attributes:
        model: an ``nn.Sequential``, a list of layers, or a function that returns one.
        data: an iterable, or a function that returns one; `evaluation` likewise, or None.
        scheduler_interval: ``"step"`` or ``"epoch"``.
        tied: tuples of names of parameters that are one, for layers given as callables.
        transient: exceptions that are worth another try.
        where: where the names come from, for messages.
        slips: names that are nearly those of what may be there and is not, with these.
    """

    model: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    data: Any
    scheduler: Callable[[Any], Any] | None
    scheduler_interval: str = "step"
    before_update: Callable[[list[nn.Parameter]], Any] | None = None
    evaluation: Any = None
    metrics: Callable[[Any, Any], Any] | None = None
    tied: Sequence[Sequence[str]] = ()
    transient: tuple[type[BaseException], ...] = ()
    where: str = "the job"
    slips: tuple[tuple[str, str], ...] = ()


def load(path: Path, arguments: tuple[str, ...]) -> Job:
    """Run a job file as a module with its folder first on the import path.

    ``import neighbour`` and ``from . import neighbour`` both find the file's neighbours; a
    neighbour named like one of our own top-level modules is the user's.

    Raises:
        UsageError: the file is missing, or a name is missing or of the wrong kind.
        Exception: what the file itself raises, a SyntaxError among them.
    """
    if not path.is_file():
        raise UsageError(f"job file {path} does not exist")
    return check(_execute(path, arguments), f"job file {path}")


class _FromSource(SourceFileLoader):
    """Runs a file as it is now.

    Python takes its cached bytecode for that of any file of the same size and the same second.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _execute(path: Path, arguments: tuple[str, ...]) -> ModuleType:
    if path.suffix != ".py":
        raise UsageError(f"job file {path} is not a Python file: its name must end in .py")
    _clear_the_way()
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments]
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(path.parent)]
    sys.modules[_PACKAGE] = package
    name = f"{_PACKAGE}.{path.stem.replace('.', '_')}"
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _clear_the_way() -> None:
    """Let the user's own ``cli`` and ``launcher`` be found: ours are not for the job file."""
    for name in list(sys.modules):
        if name in ("cli", "launcher") or name.startswith("launcher."):
            del sys.modules[name]


def check(module: Any, where: str, required: Sequence[str] = REQUIRED) -> Job:
    """The job in a module, or in anything that has the names.

    Raises:
        UsageError: a name is missing or of the wrong kind.
    """
    missing = [name for name in required if not hasattr(module, name)]
    if missing:
        plural = "names" if len(missing) > 1 else "name"
        raise UsageError(
            f"{where} lacks the {plural} {', '.join(missing)}: it must define "
            f"{', '.join(required[:-1])} and {required[-1]}{_meant(missing, dir(module))}"
        )
    for name in ("loss", "optimizer", *_OPTIONAL_FUNCTIONS):
        value = getattr(module, name, None)
        if not callable(value) and not (name in _OPTIONAL_FUNCTIONS and value is None):
            made = name in ("optimizer", "scheduler") and hasattr(value, "step")
            which = " that makes it on each stage" if made else ""
            raise UsageError(
                f"{name} in {where} is a {type(value).__name__}: it must be a function{which}, "
                f"{calls.pattern(name)}"
            )
    interval = getattr(module, "scheduler_interval", "step")
    if interval not in _INTERVALS:
        raise UsageError(
            f"scheduler_interval in {where} is {interval!r}: it must be "
            f"{' or '.join(map(repr, _INTERVALS))}"
        )
    tied = getattr(module, "tied", ())
    if not isinstance(tied, (list, tuple)):
        raise UsageError(
            f"tied in {where} is a {type(tied).__name__}: it must be a list of tuples of "
            "parameter names"
        )
    model, evaluation = module.model, getattr(module, "evaluation", None)
    if not isinstance(model, (nn.Sequential, list, tuple)) and not _is_function(model):
        raise UsageError(
            f"model in {where} is a {type(model).__name__}: it must be an nn.Sequential, a "
            "list of layers, or a function returning one"
        )
    for name, data in (("data", getattr(module, "data", None)), ("evaluation", evaluation)):
        if data is None and name not in required:
            continue
        if not any(hasattr(data, what) for what in ("__call__", "__iter__", "__getitem__")):
            raise UsageError(
                f"{name} in {where} is a {type(data).__name__}: it must be an iterable of "
                "(input, target) mini-batches, or a function returning one"
            )
    for name in calls.NAMES:
        value = getattr(module, name, None)
        if callable(value) and (problem := calls.problem(name, value)):
            raise UsageError(f"{name} in {where} {problem}")
    return Job(
        model=model,
        loss=module.loss,
        optimizer=module.optimizer,
        data=getattr(module, "data", None),
        scheduler=getattr(module, "scheduler", None),
        scheduler_interval=interval,
        before_update=getattr(module, "before_update", None),
        evaluation=evaluation,
        metrics=getattr(module, "metrics", None),
        tied=tied,
        transient=_exceptions(getattr(module, "transient", ()), where),
        where=where,
        slips=_slips(module),
    )


def _slips(module: Any) -> tuple[tuple[str, str], ...]:
    """Names of a module that nobody asks for, and those that they are nearly."""
    there = [name for name in vars(module) if name not in (*REQUIRED, *_OPTIONAL)]
    missing = [name for name in _OPTIONAL if not hasattr(module, name)]
    found = [(get_close_matches(name, there, 1, _NEARLY), name) for name in missing]
    return tuple((slip, name) for slips, name in found for slip in slips)


def _meant(missing: Sequence[str], there: Sequence[str]) -> str:
    """What is there may be a slip of a name that is missing."""
    slips = [slip for name in missing for slip in get_close_matches(name, there, 1)]
    return f"; {slips[0]} is not one of them" if slips else ""


def _exceptions(given: Any, where: str) -> tuple[type[BaseException], ...]:
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise UsageError(
                f"transient in {where} has a {type(kind).__name__}: it must be exception "
                "types, in a tuple"
            )
    return found


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def notes(job: Job, options: Options) -> tuple[str, ...]:
    """What may be meant otherwise, each in a sentence."""
    return (*_sums(job, options), *(() if options.own_loop else _unused(job, options)))


def _sums(job: Job, options: Options) -> tuple[str, ...]:
    """That a loss is a sum, where it is one of torch's and says so."""
    loss: Any = job.loss
    if isinstance(loss, partial):
        made, how = loss.func, loss.keywords.get("reduction")
    else:
        made, how = type(loss), getattr(loss, "reduction", None)
    torchs = str(getattr(made, "__module__", "")).startswith("torch.")
    if not torchs or how != "sum" or options.microbatches == 1:
        return ()
    return (
        'loss is a sum, reduction="sum", and a step takes the mean over its micro-batches: what '
        "is learnt depends on --microbatches; give a mean, or a function that returns the pair "
        "(sum, count)",
    )


def _unused(job: Job, options: Options) -> tuple[str, ...]:
    """What a job file defines, and nobody asks for."""
    slips = [f"{slip} in {job.where} is not used: is {name} meant?" for slip, name in job.slips]
    if options.evaluate_every:
        return tuple(slips)
    when = "--evaluate-every N runs it after every N steps"
    if job.evaluation is not None:
        return (*slips, f"evaluation() is defined, and not used: {when}")
    if job.metrics is not None:
        return (*slips, f"metrics() is defined, and not used: it is for evaluation(), and {when}")
    return tuple(slips)


Entry = nn.Module | Callable[[], nn.Module]


def entries(job: Job) -> dict[str, Entry]:
    """The layers of the model by their names in it, those given as callables not yet built.

    Raises:
        UsageError: ``model`` gave something that is not a sequence of layers.
    """
    model = job.model() if _is_function(job.model) else job.model
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise UsageError(
                f"model is a {type(model).__name__} with a forward of its own, which a pipeline "
                "cannot cut: give a plain nn.Sequential or a list of layers"
            )
        named = model.named_modules(remove_duplicate=False)
        return _checked({name: layer for name, layer in named if name and "." not in name})
    if not isinstance(model, (list, tuple)):
        how = ""
        if isinstance(model, nn.ModuleList):
            how = ": list(layers)"
        elif isinstance(model, nn.Module):
            how = ", into which a forward of its own is cut; uncut it is one layer, in a list"
        raise UsageError(
            f"model() returned a {type(model).__name__}: it must return an nn.Sequential or a list "
            f"of layers{how}"
        )
    return _checked({str(index): entry for index, entry in enumerate(model)})


def _checked(layers: dict[str, Any]) -> dict[str, Entry]:
    if not layers:
        raise UsageError("model() returned no layers")
    for index, entry in enumerate(layers.values()):
        if not isinstance(entry, nn.Module) and not callable(entry):
            raise UsageError(
                f"layer {index} of model() is a {type(entry).__name__}: each must be an nn.Module "
                "or a function that builds one"
            )
        if not isinstance(entry, nn.Module) and (problem := calls.problem_of_layer(entry)):
            raise UsageError(f"layer {index} of model() {problem}")
    return layers


def build(entry: Entry, index: int) -> nn.Module:
    """The module of an entry; the caller has seeded the random streams.

    Raises:
        UsageError: a callable built something else, or needs arguments.
    """
    if isinstance(entry, nn.Module):
        return entry
    try:
        built = entry()
    except TypeError as error:
        if not calls.is_refused(entry, error):
            raise
        raise UsageError(f"layer {index} of model() {calls.cannot_build(entry)}") from None
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"layer {index} of model() was built as a {type(built).__name__}: it must be an "
            "nn.Module"
        )
    return built


def check_buffers(layers: list[Entry], first: int, stop: int) -> None:
    """Refuse a buffer that this stage's layers share with others: the two would part.

    Raises:
        UsageError: a buffer of layers ``first`` to ``stop - 1`` is in another layer.
    """
    built = [(i, entry) for i, entry in enumerate(layers) if isinstance(entry, nn.Module)]
    mine = {id(b): i for i, entry in built if first <= i < stop for b in entry.buffers()}
    for index, entry in built:
        if first <= index < stop:
            continue
        for buffer in entry.buffers():
            if id(buffer) in mine:
                raise UsageError(
                    f"layers {mine[id(buffer)]} and {index} share a buffer but are on different "
                    "stages, where it would not stay the same: put them on one, see --balance"
                )
