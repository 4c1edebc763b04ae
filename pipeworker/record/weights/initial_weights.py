"""Initial weights from a file that other tools wrote; each stage reads its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UnreadableFile, UsageError, a_type
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import Checkpoint, PackedValue
from pipeworker.record.checkpoint.stage_state import StageState, UserCode, is_extra_state
from pipeworker.record.checkpoint.state_dict_diff import StateDictDiff, some
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.record.weights.conversions import Conversion, Source, names_of, only
from pipeworker.record.weights.weight_files import SAFETENSORS, find_weight_files, naming_option

_ALONE = "save model.state_dict() alone"
_ZIP = b"PK\x03\x04"


def _load_pickled(path: Path) -> dict[str, Any]:
    """Read a state dict that ``torch.save`` wrote; make or call no other object in the file."""
    try:
        with path.open("rb") as file:
            mapped = file.read(len(_ZIP)) == _ZIP  # an old torch's file is read whole
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise UnreadableFile(path, error) from None
    except pickle.UnpicklingError:
        reason = "it is damaged, or has more in it than tensors and plain values"
        raise UnreadableFile(path, f"{reason}, which could be anything", _ALONE) from None
    except Exception as error:  # a damaged file may raise any
        raise UnreadableFile(path, f"it is damaged ({error!s:.200})", "use another file") from None
    if not isinstance(found, dict) or not all(type(name) is str for name in found):
        raise UnreadableFile(path, f"it has {a_type(found)}, no state dict", _ALONE)
    within = [name for name, value in found.items() if _has_tensors(value)]
    if within and not _has_tensors(found):
        reason = f"it has state dicts by name ({some(list(map(repr, within)), 5)})"
        remedy = f"save the one of the model alone, as torch.load(FILE)[{within[0]!r}]"
        raise UnreadableFile(path, reason, remedy)
    return found


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(x, torch.Tensor) for x in value.values())


def _open(path: Path) -> TensorFile | dict[str, Any]:
    with naming_option():
        safe = path.suffix in SAFETENSORS
        return TensorFile(path, from_worker=False) if safe else _load_pickled(path)


class InitialWeights:
    """Weights for the layers of a model, by the names they have in it.

    The `path` is that of a file of weights, an index, or a folder with one of them or a checkpoint.
    A file may have any of the names of a tied weight. If `find_conversion` finds one, the file may
    have the names of the library that the model is from, and no adapters. The `diff` has what of
    the file and of the stages loaded so far does not match.

    Raises:
        UsageError: the file cannot be read; so may every method.
    """

    def __init__(
        self,
        path: Path,
        names: LayerNames,
        ties: Iterable[Sequence[str]] = (),
        find_conversion: Callable[[], Conversion | None] = lambda: None,
    ) -> None:
        source = find_weight_files(path)
        self._path = path
        self._names = names
        self._open = cache(_open)
        self._files = source.index or {n: file for file in source.files for n in self._open(file)}
        self._extra: Mapping[str, PackedValue] = {}
        if source.checkpoint is not None:
            with naming_option():
                self._extra = Checkpoint(source.checkpoint).extra()
        self._sources = {name: Source((name,), only) for name in (*self._files, *self._extra)}
        conversion = find_conversion() if source.checkpoint is None else None
        if conversion is not None:
            self._sources = conversion.sources(self._files)
        self._may_lack = conversion.adapters if conversion is not None else {}
        self._keys, self._unknown = names.by_layer(self._sources)
        self._ties = {name: tuple(group) for group in ties for name in group}
        self.diff = StateDictDiff()

    def load(self, stage: StageState, user_code: UserCode = nullcontext) -> None:
        """Load the weights and buffers of a stage that is built; record what does not match."""
        with torch.no_grad():
            stage.load(self._state_of, user_code, strict=False)

    def check_complete(self, *, strict: bool, first_worker: bool) -> int:
        """Return how many names do not match, once all stages of a worker are loaded.

        The first worker reports the weights of layers that the model lacks.

        Raises:
            UsageError: some names do not match though they must (`strict`), or no name does.
        """
        if first_worker or strict:
            self.diff.unexpected += self._unknown
        if not self.diff:
            return 0
        if strict or len(self._unknown) == len(self._sources):
            hint = f"{self._prefix_hint()}; use weights of this model"
            hint += ", or --no-init-strict, which loads what does fit" if strict else ""
            raise UsageError(f"--init-from {self._path}: does not fit the model: {self.diff}{hint}")
        return len(self.diff)

    def _prefix_hint(self) -> str:
        """Return a hint if a wrapper, as of DDP, has put a prefix before the names; else ""."""
        for wanted in self.diff.missing[:1]:
            for name in self._unknown:
                if name.endswith(f".{wanted}"):
                    return f"; remove the prefix {name.removesuffix(wanted)!r} of its names"
        return ""

    def _value(self, name: str) -> Any:
        """Return a value of the files; a tensor that is not made of others is in a file's memory.

        Raises:
            UsageError: a file lacks it, or it cannot be made of what the files have.
        """
        source = self._sources[name]
        stored = [self._stored(one) for one in source.stored]
        try:
            return source.convert(stored)
        except Exception as error:
            of = f"{name} cannot be made of {source.stored[0]}"
            of += f" and {len(stored) - 1} more" if len(stored) > 1 else ""
            raise UsageError(f"--init-from {self._path}: {of}: {error!s:.200}") from error

    def _stored(self, name: str) -> Any:
        if name in self._extra:
            with naming_option():
                return self._extra[name].read()
        path = self._files[name]
        file = self._open(path)
        with naming_option():
            try:
                return file.mapped(name) if isinstance(file, TensorFile) else file[name]
            except KeyError:
                reason = f"it lacks {name}, which its index has"
                raise UnreadableFile(path, reason, "save the model again") from None

    def _state_of(self, index: int, layer: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a layer's state dict that the file has."""
        found: dict[str, Any] = {}
        same = {key: keys for keys in names_of(layer) for key in keys}
        for key, value in state.items():
            full = self._names.parameter(index, key)
            names = [self._names.parameter(index, other) for other in same.get(key, (key,))]
            names = next((list(self._ties[n]) for n in names if n in self._ties), names)
            stored = next((n for n in names if n in self._sources), None)
            by_layer = is_extra_state(key) or not isinstance(value, torch.Tensor)  # it checks these
            if stored is None:
                self.diff.missing += [] if by_layer or full in self._may_lack else [full]
                continue
            loaded = self._value(stored)
            if by_layer:
                found[key] = copy.deepcopy(loaded)
            elif self._fits(full, loaded, value):
                found[key] = loaded
        for key in self._keys.get(index, ()):
            if key not in state:
                self.diff.unexpected.append(self._names.parameter(index, key))
        return found

    def _fits(self, name: str, loaded: Any, value: torch.Tensor) -> bool:
        """Return whether a value of the file can be copied into a tensor of the model."""
        if not isinstance(loaded, torch.Tensor):
            self.diff.different.append(f"{name} (no tensor)")
            return False
        if loaded.is_meta or loaded.is_nested or loaded.layout != value.layout:
            kind = "meta" if loaded.is_meta else "nested" if loaded.is_nested else loaded.layout
            self.diff.different.append(f"{name} (a {kind} tensor)")
            return False
        if loaded.shape == value.shape and (value.is_complex() or not loaded.is_complex()):
            return True
        found, wanted = ((tensor.dtype, tuple(tensor.shape)) for tensor in (loaded, value))
        self.diff.add_different(name, found, wanted)
        return False
