"""Weights that training begins with, from a file that others wrote: each stage reads its own."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint import Part
from pipeworker.record.image import Look
from pipeworker.record.misfits import Misfits, by_layer, is_extra
from pipeworker.record.source import SAFE, look
from pipeworker.record.tensors import TensorFile

_ZIP = b"PK\x03\x04"
Users = Callable[[str], AbstractContextManager[Any]]


class _File(Protocol):
    """What is in a file, by name."""

    def __iter__(self) -> Iterator[str]: ...

    def look(self, name: str) -> Look | None: ...

    def mapped(self, name: str) -> Any: ...


class _Pickled:
    """What ``torch.save`` wrote of a state dict; nothing else in it is made or called."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                mapped = file.read(len(_ZIP)) == _ZIP  # else it is of an old torch: read whole
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
        except pickle.UnpicklingError:
            raise UsageError(
                f"cannot read {path}: it is damaged, or has more in it than tensors and plain "
                "values, which could be anything: save model.state_dict() alone"
            ) from None
        except Exception as error:  # whatever a damaged file makes it raise
            raise UsageError(f"cannot read {path}: it is damaged ({error!s:.200})") from None
        if not isinstance(found, dict) or not all(type(name) is str for name in found):
            raise UsageError(f"cannot read {path}: it has a {type(found).__name__}, no state dict")
        self._found = found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def look(self, name: str) -> Look | None:
        value = self._found[name]
        return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None

    def mapped(self, name: str) -> Any:
        return self._found[name]


class Initial:
    """Weights for the layers of a model, by the names they have in it.

    Args:
        layers: the names of all layers of the model.
        ties: by tied weight all its names, of which the file may have any.

    Raises:
        UsageError: the file cannot be read; so may the methods.
    """

    def __init__(
        self, path: Path, layers: Collection[str], ties: Iterable[Sequence[str]] = ()
    ) -> None:
        source = look(path)
        self._path = path
        self._opened: dict[Path, _File] = {}
        self._where = source.where or {n: file for file in source.files for n in self._open(file)}
        self._layers = by_layer(self._where)
        self._unknown = [n for n in self._where if n.partition(".")[0] not in layers]
        self._ties = {name: tuple(names) for names in ties for name in names}
        self.misfits = Misfits()

    def load(self, part: Part, users: Users = nullcontext) -> None:
        """Give a stage its weights and buffers, and note what does not fit.

        Args:
            users: entered around each call of the user's code, with what is called.

        Raises:
            Exception: what the user's code raises.
        """
        with torch.no_grad():
            for name, layer, state in zip(part.names, part.layers, part.states, strict=True):
                filled: Any = copy.copy(state)  # with what it says of versions
                filled.clear()
                filled.update(self._state_of(name, layer, state))
                if filled:
                    with users(f"load_state_dict() of layer {name} ({type(layer).__name__})"):
                        layer.load_state_dict(filled, strict=False)

    def settle(self, *, partial: bool, first: bool) -> int:
        """Say what does not fit, when all stages of a worker have been given theirs.

        Args:
            partial: it may be so.
            first: whether this worker tells of layers that the model does not have.

        Returns:
            How many names do not fit.

        Raises:
            UsageError: there are some, and it may not be so, or all are of another model.
        """
        if first or not partial:
            self.misfits.unexpected += self._unknown
        if not self.misfits:
            return 0
        if not partial or len(self._unknown) == len(self._where):
            hint = "" if partial else "; --init-partial takes what does fit"
            raise UsageError(f"{self._path} does not fit the model: {self.misfits}{hint}")
        return len(self.misfits)

    def _open(self, path: Path) -> _File:
        if path not in self._opened:
            safe = path.suffix in SAFE
            self._opened[path] = TensorFile(path, of_a_stage=False) if safe else _Pickled(path)
        return self._opened[path]

    def _look(self, name: str) -> Look | None:
        path = self._where[name]
        try:
            return self._open(path).look(name)
        except KeyError:
            raise UsageError(f"cannot read {path}: it lacks {name}, which its index has") from None

    def _state_of(self, name: str, layer: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """What of a layer's state dict the file has."""
        found: dict[str, Any] = {}
        same = _same(layer)
        for key, value in state.items():
            full = f"{name}.{key}"
            names = [f"{name}.{other}" for other in same.get(key, (key,))]
            names = next((list(self._ties[n]) for n in names if n in self._ties), names)
            stored = next((n for n in names if n in self._where), None)
            theirs = is_extra(key) or not isinstance(value, torch.Tensor)  # for the layer to judge
            if stored is None:
                self.misfits.missing += [] if theirs else [full]
                continue
            look = self._look(stored)
            if theirs or self._fits(full, look, value):
                held = self._open(self._where[stored]).mapped(stored)
                found[key] = copy.deepcopy(held) if theirs else held
        for key in self._layers.get(name, ()):
            if key not in state:
                self.misfits.unexpected.append(f"{name}.{key}")
        return found

    def _fits(self, name: str, look: Look | None, value: torch.Tensor) -> bool:
        """Whether a tensor of the file can be copied into one of the model."""
        if look is None:
            self.misfits.different.append(f"{name} (no tensor)")
            return False
        dtype, shape = look
        if shape == tuple(value.shape) and (value.is_complex() or not dtype.is_complex):
            return True
        self.misfits.differ(name, look, (value.dtype, tuple(value.shape)))
        return False


def _same(layer: nn.Module) -> dict[str, list[str]]:
    """By the name of a tensor all that it has within the layer: a file may have any one."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for key, parameter in layer.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(key)
    for key, buffer in layer.named_buffers(remove_duplicate=False):
        found[id(buffer)].append(key)
    return {key: keys for keys in found.values() for key in keys}
