"""The layers of a cut module on several stages of one worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.wire.messages.plan import StageRange
from pipeworker.worker.model.model import Model
from pipeworker.worker.stage.cut.part import Part, plan_of
from pipeworker.worker.transport.structure import NO_TYPES

CPU = torch.device("cpu")


class Counts(nn.Module):
    """Counts in its forwards the inputs that are not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.layers[0].register_buffer("mask", torch.ones(2, 2))
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count = self.count + int(x.any())
        for layer in self.layers:
            x = layer(x) * (1 + self.count)
        return x


def test_each_stage_has_its_own_module_around_its_layers() -> None:
    job: Any = JobFile(Counts, None, None, None, None)  # type: ignore[arg-type]
    model = Model(
        job, 0, CPU, Tracker(), lambda m: (plan_of(m, NO_TYPES, torch.zeros(1, 2)), NO_TYPES)
    )
    stages = [model.build(StageRange(i, i, i + 1), (), (0, 1))[0] for i in (0, 1)]
    value: Any = torch.ones(1, 2)
    masks = []
    for (layer,) in stages:
        assert isinstance(layer, Part)
        value = layer(value)
        assert layer.cut.module.count == 1
        masks.append(layer.cut.module.get_buffer("layers.0.mask"))
    assert masks[0] is masks[1]  # which no stage needs; it may be large
