"""Initial weights from files of all formats."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.manifest import Manifest
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.weights.conversions import Conversion
from pipeworker.record.weights.initial_weights import InitialWeights
from pipeworker.record.weights.weight_files import find_weight_files
from support.in_process.checkpoints import save_worker_files
from support.in_process.exports import Hostile
from support.processes.memory import peak, resident

State = dict[str, Any]
LAYERS = LayerNames(("embed", "norm", "act", "head"))


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    nn.init.normal_(layers[1].get_buffer("running_mean"))
    return nn.Sequential(OrderedDict(zip(LAYERS.prefixes, layers, strict=True)))


def stages(module: nn.Sequential, *cuts: int) -> list[StageState]:
    named = list(module.named_children())
    ranges = zip((0, *cuts), (*cuts, len(named)), strict=True)
    return [
        StageState(
            LayerNames(tuple(name for name, _ in named)),
            [layer for _, layer in named[start:stop]],
            [layer.state_dict() for _, layer in named[start:stop]],
            first=start,
        )
        for start, stop in ranges
    ]


def load(path: Path, parts: Sequence[StageState], *, partial: bool = False) -> list[int]:
    """Load the weights as one worker for each stage; return the numbers of mismatches."""
    found = []
    for rank, part in enumerate(parts):
        initial = InitialWeights(path, LAYERS)
        initial.load(part)
        found.append(initial.check_complete(strict=not partial, first_worker=rank == 0))
    return found


# Formats of files.


def safe(state: State, folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def pickled(state: State, folder: Path, **options: Any) -> Path:
    torch.save(state, folder / "weights.pt", **options)
    return folder / "weights.pt"


def old(state: State, folder: Path) -> Path:
    return pickled(state, folder, _use_new_zipfile_serialization=False)


def index(state: State, folder: Path) -> Path:
    where = {}
    for number, name in enumerate(state):
        file = f"model-{1 + number % 2:05}-of-00002.safetensors"
        where[name] = file
    for file in {*where.values()}:
        save_file({name: state[name] for name in state if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder / "model.safetensors.index.json"


def indexed(state: State, folder: Path) -> Path:
    return index(state, folder).parent


def alone(state: State, folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder


def step(state: State, folder: Path) -> Path:
    made = net(5)
    made.load_state_dict(state)
    parts = stages(made, 2)
    files = [f for rank in range(2) for f in save_worker_files(folder, rank, 2, [parts[rank]])]
    manifest = Manifest(1, 2, LAYERS, tuple(files))
    (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
    return folder


def run(state: State, folder: Path) -> Path:
    last = folder / "checkpoints" / "step-00000001"
    step(state, last)
    return folder


KINDS: list[Callable[[State, Path], Path]] = [
    *(safe, pickled, old, index, indexed, alone, step, run),
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_loads_its_own_weights(
    tmp_path: Path, kind: Callable[[State, Path], Path]
) -> None:
    state = net(0).state_dict()
    path = kind(dict(state), tmp_path)
    for cuts in ((), (2,), (1, 3)):
        made = net(1)
        strides = [value.data_ptr() for value in made.state_dict().values()]
        assert not any(load(path, stages(made, *cuts)))
        for name, value in made.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert [value.data_ptr() for value in made.state_dict().values()] == strides


def test_other_dtypes_are_cast_and_other_shapes_refused(tmp_path: Path) -> None:
    state = {name: value.double() for name, value in net(0).state_dict().items()}
    made = net(1)
    load(safe(state, tmp_path), stages(made))
    assert made.embed.weight.dtype is torch.float32  # type: ignore[union-attr]
    assert torch.equal(made.state_dict()["embed.weight"], net(0).state_dict()["embed.weight"])
    state["embed.weight"] = state["embed.weight"].T.contiguous()
    state["embed.bias"] = state["embed.bias"].to(torch.complex64)
    expected = (
        r"of another shape or type are embed\.weight \(\[4, 8\] float64 for \[8, 4\] float32\), "
        r"embed\.bias \(\[8\] complex64 for \[8\] float32\); use weights of this model, or "
        r"--no-init-strict, which loads what does fit$"
    )
    with pytest.raises(UsageError, match=expected):
        load(safe(state, tmp_path), stages(made))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (torch.Tensor.to_sparse, r"torch\.sparse_coo"),
        (lambda weight: weight.to("meta"), "meta"),
        (lambda weight: torch.nested.as_nested_tensor([weight]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_weight_that_is_not_dense_is_refused(tmp_path: Path, change: Any, kind: str) -> None:
    state = net(0).state_dict()
    state["embed.weight"] = change(state["embed.weight"])
    with pytest.raises(UsageError, match=rf"type are embed\.weight \(a {kind} tensor\); use"):
        load(pickled(state, tmp_path), stages(net(1)))


def test_weights_that_were_saved_on_an_accelerator_are_read_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, made = net(0).state_dict(), net(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        path = pickled(state, tmp_path)
    assert load(path, stages(made)) == [0]
    assert torch.equal(made.get_parameter("embed.weight"), state["embed.weight"])


def test_each_stage_names_its_own_mismatches(tmp_path: Path) -> None:
    state = net(0).state_dict()
    del state["embed.bias"], state["head.bias"], state["head.weight"]
    state["norm.other"], state["tail.weight"] = torch.ones(1), torch.ones(1)
    path = safe(dict(state), tmp_path)
    for stage, expected in enumerate(
        (
            "it lacks embed.bias; the model does not have tail.weight",
            "the model does not have norm.other, tail.weight",
            "it lacks head.weight, head.bias; the model does not have tail.weight",
        )
    ):
        initial = InitialWeights(path, LAYERS)
        initial.load(stages(net(1), 1, 3)[stage])
        with pytest.raises(UsageError) as caught:
            initial.check_complete(strict=True, first_worker=stage == 0)
        hint = "; use weights of this model, or --no-init-strict, which loads what does fit"
        assert str(caught.value) == (
            f"--init-from {path}: does not fit the model: {expected}{hint}"
        )
    made = net(1)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    assert load(path, stages(made, 1, 3), partial=True) == [2, 1, 2]
    for name, value in made.state_dict().items():
        assert torch.equal(value, state.get(name, before[name])), name


def test_a_file_of_another_model_is_refused_without_strict_too(tmp_path: Path) -> None:
    path = safe({f"model.{n}": torch.ones(1) for n in range(30)}, tmp_path)
    with pytest.raises(
        UsageError, match=r"model\.17 and 20 more; use weights of this model$"
    ) as caught:
        load(path, stages(net(0)), partial=True)
    assert "it lacks embed.weight, " in str(caught.value)


def test_a_file_that_has_state_dicts_by_name_is_refused(tmp_path: Path) -> None:
    state = net(0).state_dict()
    path = pickled({"epoch": 3, "net": state, "ema": dict(state), "optimizer": {}}, tmp_path)
    expected = (
        r"cannot be read: it has state dicts by name \('net', 'ema'\); save the one of the model "
        r"alone, as torch\.load\(FILE\)\['net'\]$"
    )
    with pytest.raises(UsageError, match=expected):
        load(path, stages(net(1)), partial=True)


def test_a_prefix_of_a_wrapper_is_named(tmp_path: Path) -> None:
    path = safe({f"module.{name}": value for name, value in net(0).state_dict().items()}, tmp_path)
    for partial in (False, True):
        with pytest.raises(UsageError, match=r"; remove the prefix 'module\.' of its names;"):
            load(path, stages(net(1)), partial=partial)


def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False)
            self.same = self.one

    ties = [("a.one.weight", "c.weight")]
    for have, values in (
        ({"a.one.weight": 1.0}, (1.0, 1.0)),
        ({"c.weight": 2.0}, (2.0, 2.0)),
        ({"a.one.weight": 1.0, "c.weight": 2.0}, (1.0, 1.0)),  # the first, on every stage
        ({"a.same.weight": 3.0, "c.weight": 2.0}, (2.0, 2.0)),
    ):
        path = safe({name: torch.full((3, 3), v) for name, v in have.items()}, tmp_path)
        layers: tuple[Any, ...] = Twice(), nn.Linear(3, 3, bias=False)
        names = LayerNames(("a", "c"))
        for index, layer in enumerate(layers):
            initial = InitialWeights(path, names, ties)
            initial.load(StageState(names, [layer], [layer.state_dict()], first=index))
            assert initial.check_complete(strict=True, first_worker=index == 0) == 0
        weights = layers[0].one.weight.detach(), layers[1].weight.detach()
        assert tuple(float(weight.mean()) for weight in weights) == values
    path = safe({"a.same.weight": torch.full((3, 3), 3.0)}, tmp_path)
    twice = Twice()
    initial = InitialWeights(path, LayerNames(("a",)))
    initial.load(StageState(LayerNames(("a",)), [twice], [twice.state_dict()]))
    assert initial.check_complete(strict=True, first_worker=True) == 0
    assert float(twice.one.weight.detach().mean()) == 3.0


def test_extra_state_is_passed_to_the_layer(tmp_path: Path) -> None:
    class Counts(nn.Linear):
        count: Any = 1

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    layer = Counts(1, 1)
    layer.count = torch.tensor(7)
    part = StageState(LayerNames(("0",)), [layer], [layer.state_dict()])
    for path in (
        pickled({f"0.{name}": value for name, value in layer.state_dict().items()}, tmp_path),
        safe({"0.weight": torch.ones(1, 1), "0.bias": torch.ones(1)}, tmp_path),
    ):
        layer.count = 1
        initial = InitialWeights(path, LayerNames(("0",)))
        initial.load(part)
        assert initial.check_complete(strict=True, first_worker=True) == 0
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))  # what the layer keeps is not in its memory
        assert layer.count == (7 if path.suffix == ".pt" else 1)
    layer.count = torch.tensor(7)
    part = replace(part, states=[layer.state_dict()])
    saved = tmp_path / "saved"
    manifest = Manifest(1, 1, part.names, save_worker_files(saved, 0, 1, [part]))
    (saved / "manifest.json").write_text(json.dumps(manifest.to_json()))
    layer.count = 1
    InitialWeights(saved, part.names).load(part)
    assert layer.count == 7


@pytest.mark.parametrize("kind", [safe, pickled])
def test_a_stage_reads_only_its_own_weights(
    tmp_path: Path, kind: Callable[[State, Path], Path]
) -> None:
    megabyte, count = 1 << 20, 4
    state = {f"{n}.weight": torch.full((2048, 2048), float(n)) for n in range(count)}
    path = kind(state, tmp_path)
    state.clear()
    layer = nn.Linear(2048, 2048, bias=False)
    names = LayerNames.numbered(count)
    part = StageState(names, [layer], [layer.state_dict()], first=2)
    peak()
    before = resident(os.getpid())
    initial = InitialWeights(path, names)
    initial.load(part)
    assert initial.check_complete(strict=True, first_worker=False) == 0
    del initial
    assert float(layer.weight.detach().mean()) == 2.0
    assert resident(os.getpid()) - before < 4 * megabyte  # the layer was there already
    assert peak() - before < (16 + 4) * megabyte  # of 64


# Files that cannot be read.


def no_index(folder: Path, content: Any) -> Path:
    path = index(net(0).state_dict(), folder)
    path.write_text(json.dumps(content))
    return path


def gone(folder: Path) -> Path:
    path = index(net(0).state_dict(), folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return path


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def cut(path: Path) -> Path:
    return written(path, path.read_bytes()[:-10])


def unfinished(folder: Path) -> Path:
    (folder / "checkpoints").mkdir()
    return folder


def torn(folder: Path) -> Path:
    path = step(net(0).state_dict(), folder)
    cut(folder / "model-00002-of-00002.safetensors")
    return path


EARLY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda to: to / "a.txt", r"a\.txt: cannot be read: No such file"),
    "an empty folder": (lambda to: to, "it has no model.safetensors.index.json, no model.safe"),
    "another ending": (
        lambda to: written(to / "a.npz", b""),
        r"a file that ends in \.safetensors, \.pt, ",
    ),
    "a run without a checkpoint": (unfinished, "no complete checkpoint is there"),
    "a file that is gone": (
        gone,
        r"model-00002-of-00002\.safetensors: cannot be read: No such file",
    ),
    "no index": (lambda to: no_index(to, [1]), "not the index of a model's files"),
    "an index of paths": (
        lambda to: no_index(to, {"weight_map": {"a": "../model.safetensors"}}),
        "not the index of a model's files",
    ),
    "a torn checkpoint": (torn, r"model-00002-of-00002\.safetensors: .*it has \d+ bytes, not"),
}
LATE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a torn file": (lambda to: cut(safe(net(0).state_dict(), to)), r"it is damaged \("),
    "a torn pickle": (lambda to: cut(pickled(net(0).state_dict(), to)), "it is damaged"),
    "a torn old pickle": (lambda to: cut(old(net(0).state_dict(), to)), "it is damaged"),
    "nothing in it": (lambda to: written(to / "a.pt", b""), "it is damaged"),
    "a hostile pickle": (
        lambda to: written(to / "a.bin", pickle.dumps(Hostile(), 2)),
        r"it is damaged, or has more in it than tensors .*; save model\.state_dict\(\) alone",
    ),
    "a hostile file": (lambda to: pickled({"a": Hostile()}, to), "it is damaged, or has more in"),
    "a tensor": (lambda to: pickled(torch.ones(3), to), "it has a Tensor, no state dict"),  # type: ignore[arg-type]
    "a wrong index": (
        lambda to: no_index(to, {"weight_map": {"embed.bias": "model-00001-of-00002.safetensors"}}),
        r"00001-of-00002\.safetensors: cannot be read: it lacks embed\.bias, which its index has",
    ),
}


@pytest.mark.parametrize("name", [*EARLY, *LATE])
def test_an_unreadable_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = {**EARLY, **LATE}[name]
    path = make(tmp_path)
    before = {*tmp_path.iterdir()}
    if name in EARLY:  # before anything is started
        with pytest.raises(UsageError, match=f"^--init-from .*{message}"):
            find_weight_files(path)
    else:
        find_weight_files(path)
    with pytest.raises(UsageError, match=f"^--init-from {tmp_path}.*{message}"):
        load(path, stages(net(1)), partial=True)
    assert {*tmp_path.iterdir()} == before


class Shared(nn.Module):
    """Has a weight under a name of a module that its forward never calls, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.embed = nn.Embedding(3, 3), nn.Embedding(3, 3)
        self.embed.weight = self.shared.weight
        self.head = nn.Linear(3, 3)


def test_a_file_may_have_any_name_of_a_weight_of_the_module() -> None:
    weights = ("shared.weight", "embed.weight")
    for stored in weights:
        found = Conversion(Shared()).sources([stored, "head.weight", "other"])
        assert {name: source.stored for name, source in found.items()} == {
            **dict.fromkeys(weights, (stored,)),
            "head.weight": ("head.weight",),
            "other": ("other",),
        }
    both = Conversion(Shared()).sources(weights)
    assert [both[name].stored for name in weights] == [(name,) for name in weights]


class Counting(nn.Linear):
    """Has a number as extra state, which other modules may have as the same object."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count


def test_an_equal_extra_state_of_two_modules_is_no_weight_with_two_names() -> None:
    module = nn.Sequential(Counting(2), Counting(2))
    stored = ["0.weight", "0._extra_state"]
    assert {*Conversion(module).sources(stored)} == {*stored}


def test_a_name_that_only_a_hook_gives_to_a_weight_is_not_read() -> None:
    """No layer has it, so that a file would be rejected for a name that it has not."""
    module: Any = nn.Linear(2, 2)
    module.register_state_dict_post_hook(
        lambda one, state, prefix, _: state.update({f"{prefix}old": one.weight})
    )
    assert [*Conversion(module).sources(["weight"])] == ["weight"]
