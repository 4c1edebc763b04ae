"""Counts of operations of layers, on fake tensors: facts for a plan when nothing is measured."""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from pipeworker.facts.outline import LayerKind
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.worker.device.device import Stopwatch
from pipeworker.worker.profile.measure import LayerCall, Settings, measure_layer
from pipeworker.worker.profile.meters import OperationCounter, Operations
from pipeworker.worker.profile.optimizer import measure_update
from pipeworker.worker.profile.outline import Examine

log = logging.getLogger(__name__)
_SAMPLE = 1 << 10
"""Elements of a parameter by which the size of an optimizer's state is estimated."""
_UPDATE = 2
"""Operations of an update for each byte of the optimizer's state, and as many for a gradient's."""


def counting(job: JobFile, options: Options) -> Examine:
    """Return what counts the operations of the first layer of each kind, given fake tensors."""
    settings = Settings(
        job,
        torch.device("cpu"),
        options.seed,
        options.precision,
        deferred_batch_norm=options.deferred_batch_norm,
        repeats=1,
        budget=0.0,
        real=False,
    )
    state_ratio, working_ratio = _ratios(job)

    def count(kind: LayerKind, layer: nn.Module, call: LayerCall) -> LayerKind:
        operations = Operations()
        try:
            with operations:
                watch = OperationCounter(operations)
                facts = measure_layer(lambda: layer, call, settings, watch)
        except Exception as error:  # its forward ran, so this is rare: its backward needs numbers
            log.info("layer %d cannot be counted: %s", kind.layer, error)
            return kind
        state = round(state_ratio * facts.gradient_bytes)
        counted = dataclasses.replace(
            facts,
            optimizer_bytes=state,
            update=float(_UPDATE * (facts.gradient_bytes + state)),
            update_bytes=round(working_ratio * facts.gradient_bytes),
        )
        return dataclasses.replace(kind, counted=counted)

    return count


def _ratios(job: JobFile) -> tuple[float, float]:
    """Return bytes for each byte of a gradient: the optimizer's state, and what a step takes."""
    parameter = nn.Parameter(torch.zeros(_SAMPLE))
    layer = nn.Module()
    layer.weight = parameter
    parameter.grad = torch.zeros_like(parameter)
    found = measure_update(layer, 0, job, parameter.device, Stopwatch())
    return found.state / parameter.nbytes, found.working / parameter.nbytes
