"""The job file: run, checked, and its model's layers built. Each mistake has one clear message."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.job import signatures
from pipeworker.job.options import Options

_PACKAGE = "pipeworker_job"
REQUIRED = ("model", "loss", "optimizer", "data")
_OPTIONAL_FUNCTIONS = ("scheduler", "before_update", "metrics")
_OPTIONAL = (*_OPTIONAL_FUNCTIONS, "scheduler_interval", "evaluation", "tied", "transient")
_INTERVALS = ("step", "epoch")
_NEARLY = 0.87
"""The similarity (difflib's ratio) from which a name counts as a misspelling of another."""
_MOST_FILES = 1 << 10
"""Source files to compare between hosts; packages with more were not copied by hand."""
_DIGEST_LENGTH = 16


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
    scheduler: Callable[[Any], Any] | None = None
    scheduler_interval: str = "step"
    before_update: Callable[[list[nn.Parameter]], Any] | None = None
    evaluation: Any = None
    metrics: Callable[[Any, Any], Any] | None = None
    tied: Sequence[Sequence[str]] = ()
    transient: tuple[type[BaseException], ...] = ()
    where: str = "the job"
    misspelled: tuple[tuple[str, str], ...] = ()


def load(path: Path, arguments: tuple[str, ...]) -> JobFile:
    """Run a job file as a module, with its folder first on the import path.

    ``import neighbour`` and ``from . import neighbour`` both find modules beside the file, even if
    one is named like a top-level module of pipeworker's repository. Whatever the file raises, a
    SyntaxError among them, is raised.
    """
    if not path.is_file():
        raise UsageError(f"job file {path}: does not exist; give the path of a Python file")
    return check(_execute(path, arguments), f"job file {path}")


class _FromSource(SourceFileLoader):
    """Compiles the source: Python's cached bytecode may be of an equally large, recent file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _execute(path: Path, arguments: tuple[str, ...]) -> ModuleType:
    if path.suffix != ".py":
        raise UsageError(f"job file {path}: not a Python file; its name must end in .py")
    _forget_own_modules()
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


def _forget_own_modules() -> None:
    """Forget the repository's ``cli`` and ``launcher``, so that a user's own ones are found."""
    for name in list(sys.modules):
        if name in ("cli", "launcher") or name.startswith("launcher."):
            del sys.modules[name]


def check(module: Any, where: str, required: Sequence[str] = REQUIRED) -> JobFile:
    """Check the names of a job, given as attributes of `module`, and return them."""
    missing = [name for name in required if not hasattr(module, name)]
    if missing:
        plural = "names" if len(missing) > 1 else "name"
        raise UsageError(
            f"{where}: lacks the {plural} {', '.join(missing)}; define "
            f"{', '.join(required[:-1])} and {required[-1]}{_hint(missing, dir(module))}"
        )
    for name in ("loss", "optimizer", *_OPTIONAL_FUNCTIONS):
        value = getattr(module, name, None)
        if not callable(value) and not (name in _OPTIONAL_FUNCTIONS and value is None):
            made = name in ("optimizer", "scheduler") and hasattr(value, "step")
            which = " that makes it on each stage" if made else ""
            raise UsageError(
                f"{where}: {name} is {a_type(value)}; make it a function{which}, "
                f"{signatures.pattern(name)}"
            )
    interval = getattr(module, "scheduler_interval", "step")
    if interval not in _INTERVALS:
        raise UsageError(
            f"{where}: scheduler_interval is {interval!r}; it must be "
            f"{' or '.join(map(repr, _INTERVALS))}"
        )
    tied = getattr(module, "tied", ())
    if not isinstance(tied, (list, tuple)):
        raise UsageError(
            f"{where}: tied is {a_type(tied)}; make it a list of tuples of parameter names"
        )
    model, evaluation = module.model, getattr(module, "evaluation", None)
    if not isinstance(model, (nn.Sequential, list, tuple)) and not _is_function(model):
        raise UsageError(
            f"{where}: model is {a_type(model)}; make it an nn.Sequential, a list of layers, or a "
            "function returning one"
        )
    for name, data in (("data", getattr(module, "data", None)), ("evaluation", evaluation)):
        if data is None and name not in required:
            continue
        if not any(hasattr(data, what) for what in ("__call__", "__iter__", "__getitem__")):
            raise UsageError(
                f"{where}: {name} is {a_type(data)}; make it an iterable of (input, target) "
                "mini-batches, or a function returning one"
            )
    for name in signatures.NAMES:
        value = getattr(module, name, None)
        if callable(value) and (error := signatures.job_error(name, value)):
            raise UsageError(f"{where}: {name} {error}")
    found = {
        name: getattr(module, name) for name in (*REQUIRED, *_OPTIONAL) if hasattr(module, name)
    }
    found["transient"] = _exceptions(found.get("transient", ()), where)
    return JobFile(**found, where=where, misspelled=_misspelled(module))


def _misspelled(module: Any) -> tuple[tuple[str, str], ...]:
    """Return the names of a module that resemble an optional name it does not define."""
    defined = [name for name in vars(module) if name not in (*REQUIRED, *_OPTIONAL)]
    missing = [name for name in _OPTIONAL if not hasattr(module, name)]
    found = [(get_close_matches(name, defined, 1, _NEARLY), name) for name in missing]
    return tuple((match, name) for matches, name in found for match in matches)


def _hint(missing: Sequence[str], defined: Sequence[str]) -> str:
    """Return a hint at a defined name that may be a misspelling of a missing one."""
    matches = [match for name in missing for match in get_close_matches(name, defined, 1)]
    return f"; {matches[0]} is not one of them" if matches else ""


def _exceptions(given: Any, where: str) -> tuple[type[BaseException], ...]:
    found = (*given,) if isinstance(given, (list, tuple)) else (given,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise UsageError(
                f"{where}: transient has {a_type(kind)}; make it exception types, in a tuple"
            )
    return found


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def notes(job: JobFile, options: Options) -> tuple[str, ...]:
    """Return notes on what may be a mistake, each a sentence."""
    return (*_sums(job, options), *(() if options.own_loop else _unused(job, options)))


def _sums(job: JobFile, options: Options) -> tuple[str, ...]:
    """Return a note if the loss is one of torch's and is a sum."""
    loss: Any = job.loss
    if isinstance(loss, partial):
        made, how = loss.func, loss.keywords.get("reduction")
    else:
        made, how = type(loss), getattr(loss, "reduction", None)
    is_torchs = str(getattr(made, "__module__", "")).startswith("torch.")
    if not is_torchs or how != "sum" or options.microbatches == 1:
        return ()
    return (
        'loss is a sum, reduction="sum", and a step takes the mean over its micro-batches: the '
        "gradients depend on --microbatches; use a mean, or a function that returns the pair "
        "(sum, count)",
    )


def _unused(job: JobFile, options: Options) -> tuple[str, ...]:
    """Return notes on names that the job file defines and the options do not use."""
    found = [f"{one} in {job.where} is not used: is {name} meant?" for one, name in job.misspelled]
    if options.evaluate_every:
        return tuple(found)
    when = "--evaluate-every N runs it after every N steps"
    if job.evaluation is not None:
        return (*found, f"evaluation() is defined, and not used: {when}")
    if job.metrics is not None:
        return (*found, f"metrics() is defined, and not used: it is for evaluation(), and {when}")
    return tuple(found)


Entry = nn.Module | Callable[[], nn.Module]


def entries(job: JobFile) -> dict[str, Entry]:
    """Return the layers of the model by their names; those given as callables are not built yet."""
    model = job.model() if _is_function(job.model) else job.model
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise UsageError(
                f"model: is {a_type(model)} with a forward of its own, which a pipeline cannot "
                "cut; give a plain nn.Sequential or a list of layers"
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
            f"model() returned {a_type(model)}; return an nn.Sequential or a list of layers{how}"
        )
    return _checked({str(index): entry for index, entry in enumerate(model)})


def _checked(layers: dict[str, Any]) -> dict[str, Entry]:
    if not layers:
        raise UsageError("model() returned no layers; return at least one for each stage")
    for index, entry in enumerate(layers.values()):
        if not isinstance(entry, nn.Module) and not callable(entry):
            raise UsageError(
                f"layer {index} of model() is {a_type(entry)}; make it an nn.Module or a function "
                "that builds one"
            )
        if not isinstance(entry, nn.Module) and (error := signatures.builder_error(entry)):
            raise UsageError(f"layer {index} of model() {error}")
    return layers


def build(entry: Entry, index: int) -> nn.Module:
    """Return the layer of an entry. The caller has seeded the random generators."""
    if isinstance(entry, nn.Module):
        return entry
    try:
        built = entry()
    except TypeError as error:
        if not signatures.lacked_arguments(entry, error):
            raise
        raise UsageError(f"layer {index} of model() {signatures.needs_arguments(entry)}") from None
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"layer {index} of model() was built as {a_type(built)}; build an nn.Module"
        )
    return built


def check_buffers(layers: list[Entry], first: int, stop: int) -> None:
    """Check that the layers from `first` to before `stop` share no buffer with other stages."""
    built = [(i, entry) for i, entry in enumerate(layers) if isinstance(entry, nn.Module)]
    own = {id(b): i for i, entry in built if first <= i < stop for b in entry.buffers()}
    for index, entry in built:
        if first <= index < stop:
            continue
        for buffer in entry.buffers():
            if id(buffer) in own:
                raise UsageError(
                    f"layers {own[id(buffer)]} and {index} share a buffer but are on different "
                    "stages, where it would not stay the same; put them on one, see --balance"
                )


def source_digests(path: Path, modules: Iterable[ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield the path and a digest of the job file, and of the modules that lie beside it."""
    folder = path.parent
    found = [path]
    for module in modules:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            source = Path(file)
            if source.is_relative_to(folder) and source != path:
                found.append(source)
    for source in found[:_MOST_FILES]:
        try:
            data = source.read_bytes()
        except OSError:
            continue  # generated by the program, or removed since
        yield str(source.relative_to(folder)), hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]
