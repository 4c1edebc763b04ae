"""Weights in the files of a library, and in its modules: other names, several tensors in one.

transformers stores some weights otherwise than its modules have them: an expert is a tensor of its
own in the files, and all experts are one in the module. Its rules are in the library, by the class
of the model; they are used here by name, so that a stage reads only what its own weights are made
of. peft puts adapters around modules of a model, which then have longer names than in its files.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from pipeworker.record.checkpoint.json_state import Tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of peft's own folder."""
_WRAPPED = frozenset({"base_layer", "original_module"})
"""The names that peft gives to the module within an adapter."""
_COPIES = "modules_to_save"
"""Where peft keeps the copy of a module that trains, by adapter."""


@dataclass(frozen=True, slots=True)
class Source:
    """The names of the tensors of files that a weight is made of, and what makes it of them."""

    stored: tuple[str, ...]
    convert: Callable[[Sequence[Any]], Any]


def only(tensors: Sequence[Any]) -> Any:
    """Return the one tensor that a weight is made of."""
    return tensors[0]


class Conversion:
    """The rules by which files of a library become weights of a module.

    Attributes:
        adapters: the names in peft's own files, of weights that no file of the model has.
    """

    def __init__(self, module: nn.Module) -> None:
        state = module.state_dict(keep_vars=True)
        self._names = frozenset(state)
        self._alike = [[name for name in names if name in state] for names in names_of(module)]
        self._base: Any = base_of(module)
        self.adapters = adapters_of(module)
        self._full = {name: [name] for name in state}
        if self._base is not module:
            self._full = _by_plain_name(module, self._base, state, self.adapters)
        transformers: Any = sys.modules.get("transformers")
        is_library = transformers is not None and isinstance(
            self._base, transformers.PreTrainedModel
        )
        self._rules = _rules_of(self._base) if is_library else []

    def sources(self, stored: Iterable[str]) -> dict[str, Source]:
        """Return what the weights of the module are made of, by their names.

        A tensor of the files that is no part of a weight is there under its own name.
        """
        found: dict[str, Source] = {}
        groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for name in sorted(stored, key=_natural):  # a rule stacks experts in their order
            renamed, rule, pattern = self._renamed(name)
            if name in self._names and name not in self._full:
                found[name] = Source((name,), only)  # of a run: it has the module's own names
            elif rule is None:
                found |= {full: Source((name,), only) for full in self._full.get(renamed, [name])}
            else:
                groups.setdefault(renamed, (rule, []))[1].append((name, pattern))
        for first, (rule, parts) in groups.items():
            names = tuple(name for name, _ in parts)
            for target in rule.target_patterns:
                name = first.replace(rule.target_patterns[0], target)
                convert = partial(self._convert, rule, first, parts, name)
                found |= {full: Source(names, convert) for full in self._full.get(name, [name])}
        for alike in self._alike:  # files may have any of these names
            source = next((found[name] for name in alike if name in found), None)
            if source is not None:
                found = dict.fromkeys(alike, source) | found
        return found

    def _renamed(self, name: str) -> tuple[str, Any, str]:
        """Return the name in the base module of what a tensor of the files becomes a part of.

        With it the rule that joins or splits tensors, and its pattern, or None and "".
        """
        if not self._rules:
            return name, None, ""
        from transformers import core_model_loading as loading

        converters = [one for one in self._rules if isinstance(one, loading.WeightConverter)]
        renamings = [one for one in self._rules if isinstance(one, loading.WeightRenaming)]
        prefix = self._base.base_model_prefix
        renamed, pattern = loading.rename_source_key(
            name, renamings, converters, prefix, self._full
        )
        if renamed not in self._full:
            plain, _ = loading.rename_source_key(name, [], [], prefix, self._full)
            if plain in self._full:
                return plain, None, ""
        if pattern is None:
            return renamed, None, ""
        return renamed, next(o for o in converters if pattern in o.source_patterns), pattern

    def _convert(
        self,
        rule: Any,
        first: str,
        parts: Sequence[tuple[str, str]],
        name: str,
        tensors: Sequence[Any],
    ) -> Any:
        own = copy.deepcopy(rule)
        for (stored, pattern), tensor in zip(parts, tensors, strict=True):
            own.add_tensor(first, stored, pattern, tensor)
        made = own.convert(first, model=self._base, config=self._base.config)[name]
        return made[0] if isinstance(made, list) else made


def names_of(module: nn.Module) -> Iterable[list[str]]:
    """Return the names of each parameter and buffer of a module, in its order."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    tensors: Iterable[tuple[str, torch.Tensor]] = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        found[id(tensor)].append(name)
    return found.values()


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that orders numbers in names by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _rules_of(base: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    found: list[Any] = get_model_conversion_mapping(base)
    return found


def stored_form(weights: Tensors, folder: Path, architectures: object) -> Tensors:
    """Return weights as transformers stores them, of a model with the configuration in a folder.

    They are the same if the library, or its model, is not known here, or if it stores them so.

    Raises:
        Exception: whatever the library raises.
    """
    if not isinstance(architectures, list) or importlib.util.find_spec("transformers") is None:
        return weights
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    known = [getattr(transformers, str(name), None) for name in architectures]
    if not known or known[0] is None:
        return weights
    with torch.device("meta"):
        model = known[0](known[0].config_class.from_pretrained(folder))
    found: Tensors = revert_weight_conversion(model, weights)
    return found


def base_of(module: nn.Module) -> nn.Module:
    """Return the model within peft's adapters, or the module itself."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return module
    base: nn.Module = module.get_base_model()
    return base


def adapters_of(module: nn.Module) -> dict[str, str]:
    """Return the names in peft's files of what its adapters consist of, by those in the module."""
    if base_of(module) is module:
        return {}
    import peft

    state = module.state_dict(keep_vars=True)
    saved = peft.get_peft_model_state_dict(
        module,
        state_dict=state,
        adapter_name=module.active_adapter,
        save_embedding_layers=False,  # to find out it would ask the network
    )
    names = {id(tensor): name for name, tensor in saved.items()}
    return {name: names[id(tensor)] for name, tensor in state.items() if id(tensor) in names}


def describe_adapters(module: nn.Module) -> dict[str, Any] | None:
    """Return the content of peft's configuration, and its names of weights, as plain data.

    It is None for a module without adapters.
    """
    names = adapters_of(module)
    if not names:
        return None
    whole: Any = module
    config = copy.copy(whole.peft_config[whole.active_adapter])
    config.inference_mode = True  # as peft saves it
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        content = json.loads(Path(folder, CONFIG).read_text("utf-8"))
    return {"config": content, "names": names}


def _by_plain_name(
    module: nn.Module, base: nn.Module, state: Iterable[str], adapters: Collection[str]
) -> dict[str, list[str]]:
    """Return the names of weights within adapters, by the names that they have without these."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    prefix = next(name for name, one in module.named_modules() if one is base) + "."
    for name in state:
        parts = name.removeprefix(prefix).split(".")
        if _COPIES in parts:
            at = parts.index(_COPIES)
            del parts[at : at + 2]
        elif name in adapters:
            continue
        found[".".join(part for part in parts if part not in _WRAPPED)].append(name)
    return dict(found)
