"""Modules that are cut into layers, and the plain loop's counterpart of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pipeworker.plan.placement import Placement
from pipeworker.worker.stage.cut.calls import arguments
from pipeworker.worker.stage.cut.part import Cut, plan_of
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.transport.structure import NO_TYPES
from support.in_process.pipelines import Pipeline, filled

CPU = torch.device("cpu")
WIDTH = 8


def mse(output: Any, target: torch.Tensor) -> Any:
    value = output["out"] if isinstance(output, dict) else output
    return ((value - target) ** 2).mean()


def sample_of(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t[:2], batch[0])


def cut(module: nn.Module, batch: Any) -> tuple[CutPlan, list[nn.Module]]:
    plan = CutPlan.unpack(plan_of(module, NO_TYPES, sample_of(batch)).pack())
    return plan, list(Cut(module, NO_TYPES, CPU, plan).parts_of(module).values())


def pipeline_of(
    module: nn.Module,
    batches: list[Any],
    loss: Any,
    stages: int,
    mode: str,
    *,
    microbatches: int = 2,
) -> Pipeline:
    plan, layers = cut(copy.deepcopy(module), batches[0])
    way = filled(Placement.identity(stages), mode)
    skips = plan.skips()
    return Pipeline(
        layers, loss, batches, way, microbatches=microbatches, skips=skips, optimizer=sgd
    )


class Whole(nn.Module):
    """The module as the only layer of a plain loop."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Any) -> Any:
        args, kwargs = arguments(value)
        return self.module(*args, **kwargs)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def vectors() -> Iterator[tuple[Any, torch.Tensor]]:
    for _ in range(3):
        yield torch.randn(4, WIDTH), torch.randn(4, WIDTH)


def assert_same_tensors(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    by_name = {name.partition("^.")[2]: tensor for name, tensor in found.items()}
    for name, tensor in wanted.items():
        own = by_name[name.removeprefix("0.module.")]
        assert torch.equal(own, tensor) if tensor is not None else own is None, name
