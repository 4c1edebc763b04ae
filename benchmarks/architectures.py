"""Which architectures equal their own forward, to the bit, when they are cut.

python benchmarks/architectures.py [--kind KIND] [NAME ...] [--markdown]

Each architecture that a small configuration can build is run by itself and as one, two and three
stages, in this process: its outputs, the gradients of all weights and its buffers are compared. A
weight that several layers use is compared within 1e-6 of the largest gradient, because its
gradients are added in another order. The kinds are those of transformers (causal, masked, seq2seq,
vision, audio, image-text), and timm and diffusers, which need these libraries.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import logging
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from architecture_configs import (
    AUTO,
    BATCH,
    DECODERS,
    DIFFUSERS,
    FRAMES,
    KINDS,
    SAMPLES,
    SIDE,
    SIZED,
    TIMM,
    configured,
    found,
    noise,
    pixels,
    words,
)
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.model.classes import classes_of
from pipeworker.worker.stage.cut.part import Cut, Part, plan_of
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.stage.microbatch import Gradients, pass_boundary
from pipeworker.worker.stage.skips import Table
from pipeworker.worker.transport.structure import TypeRegistry

SECONDS, NEAR, LIBRARIES = 60, 1e-6, ("transformers", "timm", "diffusers")


def inputs_of(module: Any) -> dict[str, Any]:
    """Return a batch for a module of transformers, by the names of its forward's arguments."""
    config, names = module.config, inspect.signature(module.forward).parameters
    text, first = config.get_text_config(), module.main_input_name
    bins = found(config, "feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel")
    batch: dict[str, Any] = {}
    if "pixel_values" in names and "input_ids" not in names:
        batch = {first: pixels(config)}
    elif first == "pixel_values_videos":
        batch = {first: noise(BATCH, config.num_frames, 3, SIDE, SIDE)}
    elif first == "input_values" and "input_values" in names:
        batch = {first: noise(BATCH, SAMPLES)}
    elif first == "input_features" and "input_features" in names:
        batch = {first: noise(BATCH, FRAMES, bins or 80)}
    else:
        batch = words(text)
    if "decoder_input_ids" in names:
        rows = len(next(iter(batch.values())))
        batch["decoder_input_ids"] = words(text)["input_ids"][:rows, :9]
    if "pixel_values" in names and first == "input_ids":
        batch = with_pictures(module, batch)
    if make := INPUTS.get(config.model_type):
        batch = make(config, batch)
    return batch


def with_pictures(module: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Put a picture before each text, where a module takes it as is or as rows of patches."""
    config = module.config
    word: Any = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    given: dict[str, Any] = {}
    try:
        if "image_grid_thw" in inspect.signature(module.forward).parameters:
            own = config.vision_config
            depth = getattr(own, "temporal_patch_size", 1)
            given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
            given["pixel_values"] = noise(BATCH * 16, 3 * depth * own.patch_size**2)
        else:
            given["pixel_values"] = pixels(config)
        made = module.get_image_features(**given)
        made = getattr(made, "pooler_output", made)
        made = torch.cat(list(made)) if isinstance(made, (list, tuple)) else made
        count = made.reshape(-1, made.shape[-1]).shape[0] // BATCH
    except Exception:
        return batch
    ones = torch.ones(BATCH, count, dtype=torch.int64)
    given["input_ids"] = torch.cat([ones * word, batch["input_ids"][:BATCH]], 1)
    given["attention_mask"] = torch.cat([ones, batch["attention_mask"][:BATCH]], 1)
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = torch.eq(given["input_ids"], word).to(torch.int64)
    return given


def mel(config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Replace features by ones whose frames are last, as Whisper has them."""
    return batch | {"input_features": noise(BATCH, config.num_mel_bins, 128)}


def frames(config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Replace samples by frames of a spectrum."""
    length = getattr(config, "max_length", None) or FRAMES
    return batch | {"input_values": noise(BATCH, length, config.num_mel_bins)}


def film(config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Replace pictures by films."""
    return batch | {"pixel_values": noise(BATCH, config.num_frames, 3, SIDE, SIDE)}


def patches(config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Replace pictures by their patches, in rows, with their shapes."""
    own = config.vision_config
    return {
        "pixel_values": noise(BATCH, 16, 3 * own.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


INPUTS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "whisper": mel,
    "audio-spectrogram-transformer": frames,
    "omniasr_ctc": lambda _, batch: {"input_values": batch["input_values"].unsqueeze(1)},
    "timesformer": film,
    "videomae": film,
    "vivit": film,
    "siglip2": patches,
}
"""The inputs of modules of single model types, in the place of their batch."""


@dataclass(frozen=True)
class Case:
    """One architecture: how its module is made, and the input of it."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[Any], Any] = inputs_of


def automatic(name: str, made: Any, is_causal: bool) -> Any:
    """Build a module of transformers from a small configuration, or from a part of it."""
    transformers = importlib.import_module("transformers")
    config = configured(transformers.CONFIG_MAPPING[name])
    kind = getattr(transformers, made if isinstance(made, str) else made[0])
    if not isinstance(config, kind.config_class):
        parts = [getattr(config, part) for part in config.sub_configs]
        config = next((one for one in parts if isinstance(one, kind.config_class)), config)
    if is_causal and name in DECODERS.split():
        config.is_decoder = True
    return kind._from_config(config, attn_implementation="eager")


def cases_of(kind: str) -> Iterator[Case]:
    """Yield the cases of a kind, by name."""
    if kind in AUTO:
        mappings = importlib.import_module("transformers.models.auto.modeling_auto")
        for suffix, key in AUTO[kind].items():
            for name, made in sorted(getattr(mappings, f"MODEL_FOR_{key}_MAPPING_NAMES").items()):
                build = partial(automatic, name, made, kind == "causal")
                yield Case(f"{name}{suffix}", build)
    elif kind == "timm":
        for name in TIMM.split():
            yield Case(name, partial(of_timm, name), lambda module: {"x": module.picture})
    elif kind == "diffusers":
        for name, (config, shapes) in DIFFUSERS.items():
            yield Case(name, partial(of_diffusers, name, config), partial(shaped, shapes))


def of_timm(name: str) -> Any:
    """Build a model of timm for pictures that are as small as it allows."""
    timm = importlib.import_module("timm")
    usual = name.startswith(tuple(SIZED.split()))
    try:
        made = timm.create_model(
            name, num_classes=10, drop_rate=0.0, **({} if usual else {"img_size": 64})
        )
    except (TypeError, AssertionError, ValueError):
        made = timm.create_model(name, num_classes=10, drop_rate=0.0)
        usual = usual or hasattr(made, "patch_embed")
    side = made.default_cfg["input_size"][-1] if usual else 64
    made.__dict__["picture"] = noise(BATCH, 3, side, side)
    return made


def of_diffusers(name: str, config: dict[str, Any]) -> Any:
    """Build a model of diffusers."""
    return getattr(importlib.import_module("diffusers"), name)(**config)


def shaped(shapes: dict[str, Any], _: nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors of random numbers."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(0, shape, (BATCH,), generator=generator)
        if isinstance(shape, int)
        else torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


class Stages:
    """The layers of a cut module in several stages, whose graphs are apart."""

    def __init__(self, cut: Cut, parts: list[Part], bounds: list[int]) -> None:
        self.cut, self.parts, self.bounds = cut, parts, bounds
        self._boundaries: list[list[tuple[torch.Tensor, Gradients]]] = []
        self._phony = torch.empty(0, requires_grad=True)

    def forward(self, value: Any) -> Any:
        stashed: dict[str, Any] = {}
        for first, stop in zip(self.bounds, self.bounds[1:], strict=False):
            arriving = [name for name in stashed if first <= int(name.partition(">")[2]) < stop]
            table = Table({name: stashed.pop(name) for name in arriving})
            own = self.parts[first:stop]
            with table.active():
                value = self.cut.run(own, [part.unit for part in own], value)
            if stop < len(self.parts):
                self._boundaries.append([])
                value = tuple(self._crossed(item) for item in value)
                names = [s.name for s in self.cut.plan.skips() if s.source < stop <= s.target]
                left = table.leave([name for name in names if name not in stashed])
                stashed |= {name: self._crossed(tensor) for name, tensor in left.items()}
        return value

    def _crossed(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not item.requires_grad:
            return item.detach() if isinstance(item, torch.Tensor) else item
        gradients: Gradients = []
        value, _ = pass_boundary(item.detach(), [True], self._phony, gradients)
        self._boundaries[-1].append((item, gradients))
        return value

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for pairs in reversed(self._boundaries):
            used = [(item, found[0]) for item, found in pairs if found and found[0] is not None]
            torch.autograd.backward([item for item, _ in used], [grad for _, grad in used])


def build(case: Case) -> nn.Module:
    """Return the module of a case, in training mode and without dropout."""
    torch.manual_seed(0)
    module: nn.Module = case.build().train()
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.p = 0.0
        elif hasattr(one, "drop_prob"):
            one.__dict__["drop_prob"] = 0.0
    return module


def seeded(function: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(2)
    random.seed(2)
    return function(*args, **kwargs)


def outputs_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what a module returns, in the order of their names."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    elif not isinstance(value, (list, tuple)):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for item in value for tensor in outputs_of(item)]


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    sums = [
        (one.float() * torch.randn(one.shape, generator=generator)).sum()
        for one in outputs
        if one.requires_grad
    ]
    return torch.stack(sums).sum()


def same(one: torch.Tensor | None, other: torch.Tensor | None, near: float = 0.0) -> bool:
    """Return whether two tensors are equal, or near each other for their size."""
    if one is None or other is None or one.shape != other.shape:
        return one is other
    if torch.equal(one, other):
        return True
    size = 1.0 + other.abs().max().item() if near else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=near * size, equal_nan=True)


def differences(module: nn.Module, case: Case) -> Iterator[str]:
    """Yield what differs between the stages of a module and its own forward."""
    inputs, alone = case.inputs(module), copy.deepcopy(module)
    expected = outputs_of(seeded(alone, **copy.deepcopy(inputs)))
    loss_of(expected).backward()  # type: ignore[no-untyped-call]
    wanted, buffers = dict(alone.named_parameters()), dict(alone.named_buffers())
    loaded = [one for key, one in sys.modules.items() if key.startswith(LIBRARIES)]
    types = TypeRegistry(classes_of(loaded).values())
    plan = CutPlan.unpack(plan_of(module, types, copy.deepcopy(inputs)).pack())
    cut = Cut(module, types, torch.device("cpu"), plan)
    count = len(plan)
    for bounds in ([0, count], [0, count // 2, count], [0, count // 3, 2 * count // 3, count]):
        if len({*bounds}) < len(bounds):
            continue
        where = f"{len(bounds) - 1} stages"
        own = copy.deepcopy(module)
        parts: list[Any] = list(cut.parts_of(own).values())
        uses = Counter(id(p) for part in parts for p in part.parameters())
        stages = Stages(cut, parts, bounds)
        outputs = outputs_of(seeded(stages.forward, copy.deepcopy(inputs)))
        if len(outputs) != len(expected) or not all(map(same, outputs, expected)):
            yield f"the outputs of {where}"
        stages.backward(loss_of(outputs))
        for key, parameter in own.named_parameters():
            near = NEAR if uses[id(parameter)] > 1 else 0.0
            if not same(parameter.grad, wanted[key].grad, near):
                yield f"the gradient of {key} with {where}"
                break
        for key in own.state_dict().keys() & buffers.keys():
            if not same(own.get_buffer(key), buffers[key]):
                yield f"the buffer {key} after {where}"


def repeats(module: nn.Module, inputs: Any) -> bool:
    """Return whether a module's own forward gives the same twice."""
    first, second = (
        outputs_of(seeded(copy.deepcopy(module), **copy.deepcopy(inputs))) for _ in range(2)
    )
    return all(map(same, first, second))


def outcome(case: Case) -> tuple[str, str]:
    """Return how an architecture fares, and why."""
    try:
        module = build(case)
        outputs = outputs_of(seeded(copy.deepcopy(module), **case.inputs(module)))
        loss_of(outputs).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    if not all(one.isfinite().all() for one in outputs if one.requires_grad):
        return "not built", "its own outputs are not finite"
    if not repeats(module, case.inputs(module)):
        return "not built", "its own forward gives other numbers at each call"
    try:
        found = list(differences(module, case))
    except UsageError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    return ("different", "; ".join(found)) if found else ("equal", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="causal")
    parser.add_argument("--markdown", action="store_true", help="print the table of a page")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for kind in KINDS if args.kind == "all" else [args.kind]:
        counts: Counter[str] = Counter()
        for case in cases_of(kind):
            if args.names and case.name not in args.names:
                continue
            signal.alarm(SECONDS)
            how, why = outcome(case)
            signal.alarm(0)
            counts[how] += 1
            why = " ".join(why.split())[:200]
            row = (kind, case.name, how, why)
            print(f"| {' | '.join(row)} |" if args.markdown else " ".join(row), flush=True)
        print(f"{kind}: " + ", ".join(f"{count} {how}" for how, count in counts.most_common()))


if __name__ == "__main__":
    main()
