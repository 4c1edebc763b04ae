"""A checkpoint that is damaged, or of another model, is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.restore import restore, restored_position
from pipeworker.record.checkpoint.snapshot_buffer import SnapshotBuffer
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory
from pipeworker.record.checkpoint.stage_state import (
    StageState,
)
from record.checkpoint.stages import (
    TIE,
    Odd,
    assert_same,
    one_stage,
    shard_of,
)
from support.in_process.checkpoints import part, save_worker_files

STEPS = 3


def test_all_mismatches_are_named_and_nothing_changes(tmp_path: Path) -> None:
    (shard,) = one_stage().save(tmp_path).worker_files()
    tensors = load_file(shard.model)
    del tensors["0.bias"], tensors["3.weight"], tensors["6.weight"]
    tensors["1.extra"] = torch.ones(2)
    tensors["7.weight"] = torch.ones(3, 9)
    tensors["1.running_mean"] = tensors["1.running_mean"].bfloat16()
    save_file(tensors, shard.model, {"names": json.dumps([*tensors]), "complex128": '["2.turn"]'})
    stages = one_stage(1)
    before = copy.deepcopy(stages.state())
    with pytest.raises(UsageError) as caught:
        restore([shard], stages.parts(), TIE)
    assert str(caught.value) == (
        f"the checkpoint {tmp_path} is of another model: it lacks 0.bias, 3.weight, 6.weight; "
        "the model does not have 1.extra; of another shape or type are 1.running_mean ([8] "
        "bfloat16 for [8] float32), 7.weight ([3, 9] float32 for [3, 8] float32)"
    )
    assert_same(stages.state(), before)


def test_a_snapshot_that_does_not_fit_is_named_without_a_path() -> None:
    saved, built = (nn.ParameterDict({name: nn.Parameter(torch.ones(1))}) for name in "ab")
    names, memory = LayerNames(("0",)), SnapshotMemory()
    with closing(memory):
        part = StageState(names, [saved], [saved.state_dict()])
        SnapshotBuffer(memory).fill(STEPS, [part], ())
        own = StageState(names, [built], [built.state_dict()])
        with pytest.raises(UsageError, match=r"^the snapshot in memory is not of the model that"):
            restore([WorkerFiles(*memory.paths)], [own])


def test_a_long_list_of_names_is_shortened(tmp_path: Path) -> None:
    wide = nn.ParameterDict({f"p{n:02}": nn.Parameter(torch.ones(1)) for n in range(20)})
    save_worker_files(tmp_path, 0, 1, [StageState(LayerNames(("0",)), [nn.Linear(1, 1)], [{}])])
    with pytest.raises(UsageError, match=r"lacks 0\.p00, .*, 0\.p09 and 10 more$"):
        restore([shard_of(tmp_path)], [StageState(LayerNames(("0",)), [wide], [wide.state_dict()])])


def test_a_buffer_of_a_removed_module_is_named(tmp_path: Path) -> None:
    nested = nn.Sequential(Odd())
    save_worker_files(tmp_path, 0, 1, [StageState(LayerNames(("0",)), [nested], [{}])])
    with pytest.raises(UsageError, match=r"the model does not have 0\.0\.table, 0\.0\.twisted$"):
        restore([shard_of(tmp_path)], [StageState(LayerNames(("0",)), [nn.Tanh()], [{}])])


def test_errors_of_a_layer_are_raised_unchanged(tmp_path: Path) -> None:
    called: list[str] = []

    class Picky(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None:
            raise KeyError("from the layer")

    @contextmanager
    def users(call: str) -> Iterator[None]:
        called.append(call)
        yield

    layer = Picky(1, 1)
    part = StageState(LayerNames(("head",)), [layer], [layer.state_dict()])
    save_worker_files(tmp_path, 0, 1, [part])
    with pytest.raises(KeyError, match="from the layer"):
        restore([shard_of(tmp_path)], [part], user_code=users)
    assert called == ["load_state_dict() of layer head (Picky)"]


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole.replace(old, new)


DAMAGED, FOREIGN = r"it is damaged \(", "it is not what a worker writes"


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "truncated weights": ("model", lambda whole: whole[:-1], DAMAGED),
    "truncated state": ("optimizer", lambda whole: whole[:100], DAMAGED),
    "no JSON": ("state", lambda whole: whole[:-1], FOREIGN),
    "JSON of something else": ("state", lambda _: b'{"a": 1}', FOREIGN),
    "a list": ("state", lambda _: b"[]", FOREIGN),
    "no groups": ("state", replaced(b'"groups"', b'"g"'), FOREIGN),
    "no number": ("state", replaced(b'"updates": [{', b'"updates": [{"steps": "x", '), FOREIGN),
    "no optimizer": ("state", replaced(b'"updates": [{', b'"updates": [1, {'), FOREIGN),
    "a missing tensor": ("state", replaced(b"0.bias/exp_avg", b"0.bias/other"), FOREIGN),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    kind, change, message = DAMAGE[name]
    stages = one_stage()
    stages.train(1)
    saved = stages.save(tmp_path)
    (shard,) = saved.worker_files()
    path: Path = getattr(shard, kind)
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    assert path.read_bytes() != whole
    with pytest.raises(UsageError, match=f"{path}: cannot be read: {message}"):
        restore([shard], one_stage().parts(), TIE)
    with pytest.raises(UsageError, match=f"{path}: cannot be read: it "):
        saved.verify()
    path.unlink()
    with pytest.raises(UsageError, match=f"{path}: cannot be read: No such file"):
        restore([shard], one_stage().parts(), TIE)


def test_what_the_files_of_several_workers_lack_or_have_twice_is_named(tmp_path: Path) -> None:
    saved = one_stage().save(tmp_path)
    (shard,) = saved.worker_files()
    with pytest.raises(UsageError, match=rf"{shard.model}: .*'0\.weight' is in another part as"):
        restore([shard, shard], one_stage().parts(), TIE)
    with pytest.raises(UsageError, match="has no position in the data: a loop of its own wrote"):
        restored_position([shard])
    content = json.loads(shard.state.read_text())
    shard.state.write_text(json.dumps({**content, "data": {"epoch": 3}}))
    assert restored_position([shard]) == {"epoch": 3}


def test_the_error_about_a_sparse_buffer_says_what_to_do(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match=r"^0\.graph is .* sparse, .*; .* with persistent=False"):
        save_worker_files(tmp_path, 0, 1, [part([layer], 0)])
