"""The strides and the identity of tensors after a restore: matrix kernels add by strides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.record.checkpoint.restore import restore
from pipeworker.record.checkpoint.stage_state import buffer_infos, parameter_strides
from record.checkpoint.stages import shard_of
from support.in_process import checkpoints
from support.in_process.checkpoints import save_worker_files

optim = torch.optim


class Turned(nn.Module):
    """A layer whose forward replaces buffers by the results of `qr`, which are column by column."""

    basis: torch.Tensor
    again: torch.Tensor
    unlisted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("basis", torch.eye(3))
        self.register_buffer("unlisted", torch.eye(3), persistent=False)
        self.register_buffer("rows", torch.linalg.qr(torch.randn(3, 3)).Q)
        self.register_buffer("again", self.basis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.basis = torch.linalg.qr(self.weight.detach() @ self.basis + torch.eye(3)).Q
        self.again = self.basis
        self.unlisted = torch.linalg.qr(self.basis + self.unlisted).Q
        self.rows = (self.get_buffer("rows") @ self.basis).contiguous()
        return x @ self.basis @ self.unlisted @ self.rows @ self.weight


class Rotated(optim.SGD):
    """An optimizer that keeps a basis of eigenvectors for each matrix, as SOAP does."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            basis = state.get("basis", torch.eye(3))
            state["basis"] = torch.linalg.qr(gradient @ basis + torch.eye(3)).Q
            state["pair"] = [state["basis"].to(torch.complex128), basis]
            parameter.grad = state["basis"].t() @ gradient @ state["basis"]
        return super().step(closure)


def test_buffers_and_optimizer_state_that_are_column_by_column_stay_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [Turned(), Turned()]
    updates = [Rotated(layer.parameters(), lr=0.1) for layer in layers]
    parts = [checkpoints.part([n], 0, u) for n, u in zip(layers, updates, strict=True)]
    xs = [torch.randn(5, 3) for _ in range(4)]

    def train(number: int, inputs: list[torch.Tensor]) -> None:
        for x in inputs:
            updates[number].zero_grad()
            layers[number](x).square().mean().backward()
            updates[number].step()

    train(0, xs[:2])
    save_worker_files(tmp_path, 0, 1, [checkpoints.part([layers[0]], 0, updates[0])])
    restore([shard_of(tmp_path)], parts[1:])
    states = [next(iter(update.state.values())) for update in updates]
    pairs = [*zip(layers[0].buffers(), layers[1].buffers(), strict=True)]
    pairs += [(states[0]["basis"], states[1]["basis"])]
    pairs += zip(states[0]["pair"], states[1]["pair"], strict=True)
    for left, right in pairs:
        assert torch.equal(left, right)
        assert left.stride() == right.stride()
    assert layers[1].again is layers[1].basis
    train(0, xs[2:])
    train(1, xs[2:])
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_extra_state_that_is_column_by_column_stays_so(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self, basis: torch.Tensor) -> None:
            super().__init__()
            self.basis = basis

        def get_extra_state(self) -> torch.Tensor:
            return self.basis

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.basis = state

    one, other = Own(torch.randn(3, 3).t()), Own(torch.zeros(3, 3))
    save_worker_files(tmp_path, 0, 1, [checkpoints.part([one], 0)])
    restore([shard_of(tmp_path)], [checkpoints.part([other], 0)])
    assert torch.equal(one.basis, other.basis)
    assert one.basis.stride() == other.basis.stride()


class Projected(optim.SGD):
    """An optimizer that replaces each matrix by an orthogonal one, column by column."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data = torch.linalg.qr(parameter.detach()).Q


def test_weights_that_an_optimizer_has_replaced_are_restored_column_by_column(
    tmp_path: Path,
) -> None:
    stages = [[nn.Linear(4, 4, bias=False) for _ in range(3)] for _ in range(2)]
    updates = []
    for layers in stages:
        layers[2].weight.data = layers[0].weight.data  # places of a tied weight
        updates.append(Projected([layer.weight for layer in layers[:2]]))
    left, right = stages
    left[1](left[0](torch.randn(2, 4))).sum().backward()
    updates[0].step()
    left[2].weight.data = left[0].weight.data
    save_worker_files(tmp_path, 0, 1, [checkpoints.part(left, 0, updates[0])])
    restore([shard_of(tmp_path)], [checkpoints.part(right, 0, updates[1])])
    for one, other in zip(left, right, strict=True):
        assert not one.weight.is_contiguous()
        assert torch.equal(one.weight, other.weight)
        assert one.weight.stride() == other.weight.stride()
    assert right[0].weight.data_ptr() == right[2].weight.data_ptr()


def test_a_weight_of_a_loaded_script_stays_the_one_that_is_trained(tmp_path: Path) -> None:
    """The weight is a plain tensor, which restore() must not take for a buffer."""
    scripted: Any = torch.jit.script(nn.Linear(3, 3))
    torch.jit.save(scripted, tmp_path / "linear.pt")
    one, other = (torch.jit.load(tmp_path / "linear.pt") for _ in range(2))  # type: ignore[no-untyped-call]
    one.weight.data = torch.linalg.qr(one.weight.detach()).Q
    update = optim.SGD(other.parameters())
    folder = tmp_path / "run" / "checkpoints" / "x"
    folder.mkdir(parents=True)
    save_worker_files(folder, 0, 1, [checkpoints.part([one], 0)])
    restore([shard_of(folder)], [checkpoints.part([other], 0, update)])
    weight = update.param_groups[0]["params"][0]
    assert weight.data_ptr() == other.weight.data_ptr()
    assert weight.requires_grad
    assert torch.equal(weight, one.weight)
    assert weight.stride() == one.weight.stride() == (1, 3)


def test_weights_without_elements_keep_their_dtypes(tmp_path: Path) -> None:
    """All such weights have one address, as the places of a tied weight have."""
    dtypes = torch.float32, torch.float64
    left, right = (nn.ParameterList(torch.zeros(0, 3, dtype=d) for d in dtypes) for _ in range(2))
    for parameter in left:
        parameter.data = torch.zeros(3, 0, dtype=parameter.dtype).t()
    save_worker_files(tmp_path, 0, 1, [checkpoints.part([left], 0)])
    restore([shard_of(tmp_path)], [checkpoints.part([right], 0)])
    assert [parameter.dtype for parameter in right] == [*dtypes]


def test_a_job_file_that_has_changed_gives_weights_other_strides(tmp_path: Path) -> None:
    """Weights that an optimizer has replaced have the strides of the update."""
    one, other = (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(3, 3)) for _ in range(2))
    built = [parameter_strides(one)]
    one[1].weight.data = torch.linalg.qr(one[1].get_parameter("weight").detach()).Q
    other[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save_worker_files(tmp_path, 0, 1, [replace(checkpoints.part([one], 0), built_strides=built)])
    restore([shard_of(tmp_path)], [checkpoints.part([other], 0)])
    image, matrix = (layer.get_parameter("weight") for layer in other)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert matrix.stride() == (1, 3)


@pytest.mark.filterwarnings("ignore:.*(prototype stage|deprecated)")
def test_nested_and_quantized_buffers_in_no_state_dict_are_as_they_were_built(
    tmp_path: Path,
) -> None:
    """No file has them, nor their strides."""

    def layer() -> nn.Module:
        made = nn.Linear(2, 2)
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        table = torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8).t()
        made.register_buffer("nested", nested, persistent=False)
        made.register_buffer("table", table, persistent=False)
        return made

    one, other = layer(), layer()
    built = [buffer_infos(one)]
    save_worker_files(tmp_path, 0, 1, [replace(checkpoints.part([one], 0), built_buffers=built)])
    restore([shard_of(tmp_path)], [checkpoints.part([other], 0)])
    assert torch.equal(one.get_parameter("weight"), other.get_parameter("weight"))
    assert other.get_buffer("nested").is_nested
    assert other.get_buffer("table").is_quantized
