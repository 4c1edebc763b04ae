"""Outputs that must not change: while they are sent, and in the recompute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.plan.placement import Placement
from support.in_process.cut_modules import mse, sgd
from support.in_process.pipelines import Pipeline, filled
from support.in_process.plain_loop import plain

WIDTH = 4


class Reusing(nn.Module):
    """Frozen features in one preallocated tensor, or a clone of it."""

    def __init__(self, *, clones: bool) -> None:
        super().__init__()
        self.weight: torch.Tensor
        self.register_buffer("weight", torch.eye(WIDTH) * 2)
        self.held, self.clones = [torch.empty(2, WIDTH)], clones

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.mm(x, self.weight, out=self.held[0])
            return self.held[0].clone() if self.clones else self.held[0]


class Keeping(Reusing):
    """The preallocated tensor in an attribute, of which pipeworker makes copies."""

    def __init__(self) -> None:
        super().__init__(clones=False)
        self.out = torch.empty(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.mm(x, self.weight, out=self.out)


class Inferring(nn.Module):
    """The same in inference mode, where torch counts no changes."""

    def __init__(self) -> None:
        super().__init__()
        self.out: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out = torch.empty_like(x) if self.out is None else self.out
        return torch.mul(x, 2, out=self.out)


def pipeline_of(first: nn.Module, placement: Placement) -> Pipeline:
    torch.manual_seed(0)
    layers = [first, nn.Linear(WIDTH, WIDTH)]
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]
    return Pipeline(layers, mse, batches, filled(placement, "never"), microbatches=4, optimizer=sgd)


PLACEMENTS = pytest.mark.parametrize(
    "placement", [Placement.identity(2), Placement(((0, 1),))], ids=["sent", "on one worker"]
)


@PLACEMENTS
def test_an_output_that_is_overwritten_before_it_is_read_is_an_error(placement: Placement) -> None:
    what = r"the output of layer 0 \(Reusing\) for micro-batch 0"
    with pytest.raises(PipeworkerError, match=rf"{what}: was changed in place .* as out\.clone"):
        pipeline_of(Reusing(clones=False), placement).train(2)
    assert len(pipeline_of(Reusing(clones=True), placement).train(2).losses) == 2


@PLACEMENTS
def test_an_attribute_that_is_overwritten_may_be_the_output(placement: Placement) -> None:
    pipeline = pipeline_of(Keeping(), placement)
    torch.manual_seed(0)
    layers: list[nn.Module] = [Keeping(), nn.Linear(WIDTH, WIDTH)]
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]
    assert pipeline.train(2).losses == plain(layers, mse, batches, 4, sgd).losses


@PLACEMENTS
def test_outputs_made_in_inference_mode_are_copied(placement: Placement) -> None:
    pipeline = pipeline_of(Inferring(), placement)
    torch.manual_seed(0)
    layers: list[nn.Module] = [Doubling(), nn.Linear(WIDTH, WIDTH)]
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]
    expected = plain(layers, mse, batches, 4, sgd)
    assert pipeline.train(2).losses == expected.losses


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse()


@PLACEMENTS
def test_an_output_that_is_sparse_is_an_error(placement: Placement) -> None:
    with pytest.raises(PipeworkerError, match=r"^a torch\.sparse_coo tensor cannot pass .* dense"):
        pipeline_of(Sparse(), placement).train(1)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Counting(nn.Module):
    """Multiplies by the number of its forwards, which a list holds."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.count, self.generator = [0], torch.Generator() if draws else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count[0] += 1
        if self.generator is not None:
            return x + torch.randn(x.shape, generator=self.generator)
        return x * self.count[0]


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("place", [0, 1], ids=["output", "loss"])
def test_an_output_that_the_recompute_changes_is_an_error(draws: bool, place: int) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]
    for mode in ("never", "always"):
        layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        layers[place] = nn.Sequential(layers[place], Counting(draws=draws))
        way = filled(Placement.identity(2), mode)
        pipeline = Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd)
        if mode == "never":
            assert len(pipeline.train(2).losses) == 2
            continue
        what = f"stage {place}: its output for micro-batch 0 has other numbers in the recompute"
        with pytest.raises(UsageError, match=what):
            pipeline.train(2)
