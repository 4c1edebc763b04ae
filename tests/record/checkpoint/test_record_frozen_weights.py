"""Frozen weights are a file of their own, which checkpoints share while they stay the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.checkpoint.manifest import Manifest, describe_file, file_names
from pipeworker.record.checkpoint.snapshot_buffer import (
    SnapshotBuffer,
    file_contents,
    snapshot_files,
)
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory, write_contents
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.record.rundir import RunDir
from support.in_process.checkpoints import part, save_worker_files

MODEL, _, _ = NAMES = file_names(0, 1)
FROZEN = MODEL.replace(".safetensors", "-frozen.safetensors")


def layers() -> list[nn.Module]:
    torch.manual_seed(4)
    frozen = nn.Linear(64, 64, dtype=torch.complex128).requires_grad_(False)
    adapted = nn.Linear(64, 64)
    adapted.weight.requires_grad_(False)
    return [frozen, adapted, nn.Linear(64, 3)]


def weight_of(layer: nn.Module) -> torch.Tensor:
    return layer.get_parameter("weight").data


def from_memory(folder: Path, step: int, stage: StageState) -> tuple[CheckpointFile, ...]:
    return save_worker_files(folder, 0, 1, [stage])


def directly(folder: Path, step: int, stage: StageState) -> tuple[CheckpointFile, ...]:
    return write_contents(file_contents(0, NAMES, 1, [stage]), folder)


Save = Callable[[Path, int, StageState], tuple[CheckpointFile, ...]]


def complete(run: RunDir, step: int, net: list[nn.Module], save: Save = from_memory) -> Path:
    run.checkpoints.path.mkdir(parents=True, exist_ok=True)
    partial = run.checkpoints.partial(step)
    stage = part(net, 0)
    reported = save(partial, step, stage)
    assert {*reported} == {*map(describe_file, partial.iterdir())}
    run.checkpoints.commit(Manifest(step, 1, LayerNames.numbered(len(net)), reported))
    return run.checkpoints.at(step)


@pytest.mark.parametrize("save", [from_memory, directly])
def test_unchanged_frozen_weights_are_written_once(tmp_path: Path, save: Save) -> None:
    run, net = RunDir(tmp_path / "run"), layers()
    first = complete(run, 1, net, save)
    with torch.no_grad():
        weight_of(net[2]).add_(1)
    second = complete(run, 2, net, save)
    assert (first / FROZEN).samefile(second / FROZEN)
    assert not (first / MODEL).samefile(second / MODEL)
    for path, difference in ((first, 1), (second, 0)):
        Checkpoint(path).verify()
        weights = Checkpoint(path).weights()
        for index, layer in enumerate(net):
            for key, value in layer.state_dict().items():
                changed = difference if (index, key) == (2, "weight") else 0
                assert torch.equal(weights[f"{index}.{key}"] + changed, value), key
    index = json.loads((second / "model.safetensors.index.json").read_text())["weight_map"]
    assert {index["0.weight"], index["1.weight"]} == {FROZEN}
    assert {index["1.bias"], index["2.weight"]} == {MODEL}


def test_changed_frozen_weights_are_written_again(tmp_path: Path) -> None:
    """A teacher that follows its student wants no gradient, and changes all the same."""
    run, net = RunDir(tmp_path / "run"), layers()
    first = complete(run, 1, net)
    weight_of(net[1]).mul_(0.5)
    second = complete(run, 2, net)
    assert not (first / FROZEN).samefile(second / FROZEN)
    assert torch.equal(Checkpoint(second).weights()["1.weight"], weight_of(net[1]))
    third = complete(run, 3, net)
    assert (second / FROZEN).samefile(third / FROZEN)


@pytest.mark.parametrize("save", [from_memory, directly])
def test_a_checkpoint_that_is_written_again_leaves_the_shared_file_alone(
    tmp_path: Path, save: Save
) -> None:
    run, net = RunDir(tmp_path / "run"), layers()
    first = complete(run, 1, net)
    save(run.checkpoints.partial(2), 2, part(net, 0))
    assert (run.checkpoints.partial(2) / FROZEN).samefile(first / FROZEN)
    weight_of(net[1]).mul_(0.5)
    second = complete(run, 2, net, save)
    Checkpoint(first).verify()
    Checkpoint(second).verify()


def test_weights_are_shared_with_a_checkpoint_that_is_not_complete(tmp_path: Path) -> None:
    run, net = RunDir(tmp_path / "run"), layers()
    complete(run, 9, net)
    begun = run.checkpoints.partial(10)
    from_memory(begun, 10, part(net, 0))
    (run.checkpoints.at(9) / FROZEN).unlink()
    assert (complete(run, 11, net) / FROZEN).samefile(begun / FROZEN)


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    net = layers()
    one = complete(RunDir(tmp_path / "one"), 1, net, from_memory)
    other = complete(RunDir(tmp_path / "other"), 1, net, directly)
    for name in (MODEL, FROZEN):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("kind", ["all", "none"])
def test_weights_of_one_kind_are_one_file(tmp_path: Path, kind: str) -> None:
    net: list[nn.Module] = [nn.Linear(3, 3).requires_grad_(kind == "none")]
    for number, save in enumerate((from_memory, directly)):
        path = complete(RunDir(tmp_path / str(number)), 1, net, save)
        assert {file.name for file in path.glob("*.safetensors")} == {*NAMES[:2]}


def test_an_empty_weight_behind_all_others_is_saved(tmp_path: Path) -> None:
    net = [*layers(), nn.ParameterList([nn.Parameter(torch.empty(0))])]
    assert "3.0" in Checkpoint(complete(RunDir(tmp_path / "run"), 1, net)).weights()


@pytest.mark.parametrize("more", [4, -4])
def test_an_earlier_file_of_another_length_is_not_shared(tmp_path: Path, more: int) -> None:
    run, net = RunDir(tmp_path / "run"), layers()
    earlier = complete(run, 1, net) / FROZEN
    os.truncate(earlier, earlier.stat().st_size + more)
    Checkpoint(complete(run, 2, net)).verify()


def test_a_link_in_place_of_the_earlier_file_is_not_followed(tmp_path: Path) -> None:
    run, net = RunDir(tmp_path / "run"), layers()
    first = complete(run, 1, net)
    secret = tmp_path / "secret"
    (first / FROZEN).rename(secret)
    (first / FROZEN).symlink_to(secret)
    second = complete(run, 2, net)
    assert (second / FROZEN).is_file()
    assert not (second / FROZEN).is_symlink()
    assert not (second / FROZEN).samefile(secret)


def test_a_file_system_without_second_names_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    run, net = RunDir(tmp_path / "run"), layers()
    first = complete(run, 1, net)
    monkeypatch.setattr(os, "link", refused)
    second = complete(run, 2, net)
    assert not (first / FROZEN).samefile(second / FROZEN)
    Checkpoint(second).verify()


def test_a_snapshot_in_memory_has_frozen_weights_apart_while_there_are_some() -> None:
    net = layers()
    with closing(SnapshotMemory()) as memory:
        buffer = SnapshotBuffer(memory)
        for number, frozen in enumerate(([0, 1], [], [0, 1], [0, 1, 2])):
            for index, layer in enumerate(net):
                layer.requires_grad_(index not in frozen)
                weight_of(layer).fill_(number)
            buffer.fill(number, [part(net, 0)])
            files = [TensorFile(path) for path in snapshot_files(memory, number, 1).weights]
            assert len(files) == (2 if frozen == [0, 1] else 1)
            apart = {int(name[0]) for file in files[1:] for name in file}
            assert apart == ({0, 1} if frozen == [0, 1] else set())
            saved = {name: tensor for file in files for name, tensor in file.items()}
            for name, value in nn.ModuleList(net).state_dict().items():
                assert torch.equal(saved[name], value)
