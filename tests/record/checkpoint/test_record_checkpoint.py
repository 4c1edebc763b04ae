"""A worker's part of a checkpoint, and how a checkpoint is read."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.checkpoint.json_state import InvalidState, pack, unpack
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.record.checkpoint.worker_content import check_savable
from support.in_process.checkpoints import optimizer_state, part, save_worker_files


def saved(folder: Path, *parts: StageState, elsewhere: frozenset[int] = frozenset()) -> Checkpoint:
    """Save the checkpoint of a single worker."""
    files = save_worker_files(folder, 0, 1, parts, elsewhere)
    layers = LayerNames(
        tuple(part.names.prefixes[index] for part in parts for index, _, _ in part.indexed())
    )
    manifest = Manifest(1, len(parts), layers, files)
    (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
    return Checkpoint(folder)


def updates(of: Checkpoint) -> list[dict[str, Any]]:
    (shard,) = of.worker_files()
    found: list[dict[str, Any]] = json.loads(shard.state.read_text())["updates"]
    return found


def test_optimizer_state_is_kept_by_parameter_name(tmp_path: Path) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    layers[1].bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    params = [p for layer in layers for p in layer.parameters()]
    groups: list[dict[str, Any]] = [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}]
    optimizer = torch.optim.AdamW(groups)
    nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = saved(tmp_path, part(layers, 3, optimizer))
    state = optimizer_state(found.path)
    assert list(state) == ["3.weight", "3.bias", "4.weight"]
    for name, parameter in zip(state, params, strict=False):
        assert state[name].keys() == optimizer.state[parameter].keys()
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(state[name][key], value)
    (update,) = updates(found)
    assert [group["params"] for group in update["groups"]] == [
        ["3.weight", "3.bias"],
        ["4.weight", "4.bias"],
    ]
    assert update["groups"][0]["lr"] == 0.5


def test_a_tied_parameter_is_saved_under_its_first_name(tmp_path: Path) -> None:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    optimizer = torch.optim.Adam([a.weight])
    b(a(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    found = saved(tmp_path, part([a, b], 0, optimizer))
    assert list(optimizer_state(found.path)) == ["0.weight"]
    assert list(found.weights()) == ["0.weight", "1.weight"]


def test_optimizer_state_of_several_stages_is_merged_without_what_others_write(
    tmp_path: Path,
) -> None:
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    first, third = (torch.optim.Adam(layers[index].parameters()) for index in (0, 2))
    nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()
    first.step(), third.step()
    parts = [part([layers[0]], 0, first), part([layers[1]], 1), part([layers[2]], 2, third)]
    other = frozenset({id(layers[2].weight)})
    for elsewhere, names in ((frozenset(), ["0.weight", "2.weight"]), (other, ["0.weight"])):
        found = saved(tmp_path / str(len(names)), *parts, elsewhere=elsewhere)
        assert list(found.weights()) == ["0.weight", "1.weight", "2.weight"]
        assert list(optimizer_state(found.path)) == names
        assert [n for update in updates(found) for g in update["groups"] for n in g["params"]] == (
            names
        )


class Odd(nn.Module):
    """A module with state of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.small = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("wide", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("turned", torch.randn(3, 4).T)
        self.register_buffer("number", torch.tensor(7))
        self.register_buffer("none", torch.ones(0, 3))

    def get_extra_state(self) -> Any:
        return {"seen": 3, "at": torch.ones(2)}


def test_weights_of_all_kinds(tmp_path: Path) -> None:
    layer = Odd()
    found = saved(tmp_path, part([layer], 0))
    weights = found.weights()
    state = {f"0.{key}": value for key, value in layer.state_dict().items()}
    del state["0._extra_state"]
    assert weights.keys() == state.keys()
    for name, value in state.items():
        assert weights[name].dtype is value.dtype
        assert torch.equal(weights[name], value), name
    (shard,) = found.worker_files()
    packed = json.loads(shard.state.read_text())["extra"]["0._extra_state"]
    assert packed == {"seen": 3, "at": {"$tensor": "0._extra_state/at"}}


def test_a_checkpoint_is_read_by_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"folder-\xff")
    path.mkdir()
    save_file({"0.weight": torch.arange(4.0)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").rename(path / "x.safetensors")
    file = TensorFile(path / "x.safetensors", from_worker=False)
    assert torch.equal(file["0.weight"], torch.arange(4.0))
    with pytest.raises(UsageError, match="No such file"):
        TensorFile(path / "y.safetensors")


@pytest.mark.parametrize(
    ("scheduled", "group", "message"),
    [
        ({"best": {1, 2}}, {}, "scheduler/best is a builtins.set: a checkpoint holds"),
        ({}, {"hook": print}, "groups/0/hook is a builtins.builtin_function_or_method: "),
    ],
)
def test_state_that_cannot_be_saved_is_refused_early(
    scheduled: Any, group: Any, message: str
) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(layer.parameters()), **group}], lr=0.1)
    with pytest.raises(UsageError, match=message):
        check_savable([part([layer], 0, optimizer, scheduled)])


@pytest.mark.parametrize(
    ("key", "shown"), [("calls", "'calls'"), (torch.zeros(()), r"tensor\(0.\)")]
)
def test_optimizer_state_of_no_parameter_is_refused(key: Any, shown: str) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[key] = {"calls": 3}
    with pytest.raises(UsageError, match=f"the optimizer's state has the key {shown}, which is no"):
        check_savable([part([layer], 0, optimizer)])


def test_optimizer_state_of_a_class_of_tensors_is_refused() -> None:
    class Coded(torch.Tensor):
        """A tensor like those of torchao's optimizers, of which a file has the numbers alone."""

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    optimizer.state[layer.weight] = {"mean": torch.zeros(2, 2).as_subclass(Coded)}
    with pytest.raises(UsageError, match=r"^0\.weight/mean is a .*\.Coded, which a run that"):
        check_savable([part([layer], 0, optimizer)])


OLD = """{"version": 2, "step": 3, "stages": 1, "layers": ["0", "1"], "files": {
"model-00001-of-00001.safetensors": {"bytes": 10, "crc32": 7},
"optimizer-00001-of-00001.safetensors": {"bytes": 11, "crc32": 8},
"state-00001-of-00001.json": {"bytes": 12, "crc32": 9}},
"ties": [["0.weight", "1.weight"]], "crc32": 2767733076}"""
"""A manifest of version 2, which has no file of frozen weights."""


def test_a_manifest_of_the_version_before_is_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(OLD)
    found = Manifest.read(tmp_path / MANIFEST)
    assert (found.step, found.stages, found.ties) == (3, 1, (("0.weight", "1.weight"),))
    assert [(file.name, file.bytes) for file in found.files] == [
        ("model-00001-of-00001.safetensors", 10),
        ("optimizer-00001-of-00001.safetensors", 11),
        ("state-00001-of-00001.json", 12),
    ]


@pytest.mark.parametrize("name", ["model", "optimizer", "state"])
def test_verify_names_the_file_with_a_flipped_bit(tmp_path: Path, name: str) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = saved(tmp_path, part([layer], 0, optimizer))
    (shard,) = found.worker_files()
    path: Path = getattr(shard, name)
    found.verify()
    whole = path.read_bytes()
    for at in {*range(0, len(whole), 5), *range(20), *range(len(whole) - 20, len(whole))}:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(
            UsageError, match=f"^{path}: cannot be read: .*its checksum does not match"
        ):
            found.verify()
        found.worker_files()  # which leaves that to others


# State as JSON.

numbers = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["$tuple", "$tensor"])
values = st.recursive(
    numbers | st.text(max_size=3) | st.binary(max_size=3) | st.floats(width=32).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@given(values)
def test_unpack_inverts_pack(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(value, tensors, "x"), allow_nan=False)
    assert alike(unpack(json.loads(text), tensors), value)


def test_unpack_inverts_pack_for_special_values() -> None:
    value = [
        *(math.inf, -math.inf, Counter({3: 2}), OrderedDict(b=1, a=2), torch.Size([2, 3])),
        *(torch.bfloat16, np.arange(3, dtype=np.uint32), np.float32(0.1), -0.0, b"\0\xff"),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    ]
    tensors: dict[str, torch.Tensor] = {}
    found = unpack(json.loads(json.dumps(pack(value, tensors, "x"), allow_nan=False)), tensors)
    for one, other in zip(value, found, strict=True):
        assert type(one) is type(other)
        assert repr(one) == repr(other)
    (nan,) = unpack(pack([math.nan], {}, "x"), {})
    assert math.isnan(nan)


@pytest.mark.parametrize(
    "value", [np.array([1.0], ">f4"), np.longdouble(3), np.array(["a"]), np.datetime64("2020")]
)
def test_numpy_values_that_no_tensor_has_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^x/0 is of NumPy's .*, and no tensor is"):
        pack([value], {}, "x")


KINDS = "tuple items Counter OrderedDict float bytes size dtype tensor complex array scalar dict"
WORDS = ["$", *(f"${kind}" for kind in KINDS.split())]
hostile = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(WORDS),
            inner | st.sampled_from(["t", "nan", "torch.float32", [["a", 1]], [[[], 1]]]),
            max_size=1,
        )
    ),
    max_leaves=8,
)


@given(hostile)
def test_hostile_packed_values_are_refused_or_plain(packed: Any) -> None:
    """Only InvalidState is raised, and only plain values are made."""
    with contextlib.suppress(InvalidState):
        unpack(packed, {"t": torch.ones(2)})


def test_deeply_nested_values_are_refused() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UsageError, match="nested too deeply"):
        pack(deep, {}, "x")
    with pytest.raises(InvalidState, match="nested too deeply"):
        unpack(deep, {})


@pytest.mark.parametrize("text", ["my model", "[]", '["other"]', "3", "[1]"])
def test_another_programs_file_may_have_any_metadata(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"names": text, "complex128": text})
    file = TensorFile(path, from_worker=False)
    assert torch.equal(file["a"], torch.ones(2))
    with pytest.raises(UsageError, match="it is damaged"):
        TensorFile(path)
