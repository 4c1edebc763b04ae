"""Counts of operations of layers, on fake tensors: facts for a plan when nothing is measured."""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.facts.outline import LayerKind
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.worker import blame
from pipeworker.worker.device.device import Stopwatch
from pipeworker.worker.profile.measure import LayerCall, Settings, measure_layer
from pipeworker.worker.profile.meters import OperationCounter, Operations
from pipeworker.worker.profile.optimizer import measure_update
from pipeworker.worker.profile.outline import Examine
from pipeworker.worker.stage.layers import StageConfig

log = logging.getLogger(__name__)
_SAMPLE = 1 << 10
"""Elements of a parameter by which the size of an optimizer's state is estimated."""
_UPDATE = 2
"""Operations of an update for each byte of the optimizer's state, and as many for a gradient's."""


def counting(job: JobFile, options: Options, problems: list[str]) -> Examine:
    """Return what counts the operations of the first layer of each kind, given fake tensors.

    It adds to `problems` why a layer cannot be counted, and leaves that one without counts.
    """
    stage = dataclasses.replace(StageConfig.of(options, torch.device("cpu")), compiler=None)
    settings = Settings(job, stage, repeats=1, budget=0.0, real=False)
    state_ratio, working_ratio = _ratios(job)

    def count(kind: LayerKind, layer: nn.Module, call: LayerCall) -> LayerKind:
        try:
            facts = _counted(layer, call, settings)
        except Exception as error:
            named = "" if isinstance(error, blame.UserCodeError) else f"layer {kind.layer}: "
            problems.append(f"{named}{blame.problem(error)}")
            log.info("cannot be counted: %s", problems[-1])
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


def _counted(layer: nn.Module, call: LayerCall, settings: Settings) -> LayerFacts:
    """Return the facts of a layer.

    If its backward needs numbers, each gradient counts as much as the forward, as in a product of
    matrices.

    Raises:
        Exception: whatever the layer raises.
    """
    operations = Operations()
    watch = OperationCounter(operations)
    try:
        with operations:
            return measure_layer(lambda: layer, call, settings, watch)
    except Exception as error:
        log.info("the backward of layer %d is not counted: %s", call.index, error)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    layer.requires_grad_(requires_grad=False)
    popped = {name: (tensor, False) for name, (tensor, _) in call.popped.items()}
    forward_only = dataclasses.replace(
        call, wants_grad=[False] * len(call.wants_grad), popped=popped
    )
    with operations:
        facts = measure_layer(lambda: layer, forward_only, settings, watch)
    of_input = any(call.wants_grad) or any(wanted for _, wanted in call.popped.values())
    return dataclasses.replace(
        facts,
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        backward=(of_input + bool(trained)) * facts.forward,
        backward_input=of_input * facts.forward,
        saved_bytes=facts.output_bytes,
        passes_gradient=of_input or bool(trained),
    )


def _ratios(job: JobFile) -> tuple[float, float]:
    """Return bytes for each byte of a gradient: the optimizer's state, and what a step takes."""
    parameter = nn.Parameter(torch.zeros(_SAMPLE, device="cpu"))
    layer = nn.Module()
    layer.weight = parameter
    parameter.grad = torch.zeros_like(parameter)
    found = measure_update(layer, 0, job, parameter.device, Stopwatch())
    return found.state / parameter.nbytes, found.working / parameter.nbytes
