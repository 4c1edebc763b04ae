"""The facts of the job's optimizer for the parameters of one layer."""

from __future__ import annotations

import dataclasses
import logging
from typing import NamedTuple

import torch
from torch import nn

from pipeworker.job.file import JobFile
from pipeworker.worker.device.device import Stopwatch
from pipeworker.worker.profile.meters import memory_meter
from pipeworker.worker.stage.values import bytes_of, distinct_tensors
from pipeworker.worker.update.update import Updater

log = logging.getLogger(__name__)


class UpdateFacts(NamedTuple):
    """The costs of the optimizer's step for the parameters of a layer.

    Attributes:
        state: bytes of the optimizer's state.
        seconds: what the step takes, with the norm of the gradient before it.
        working: bytes that the step takes for a time.
    """

    state: int = 0
    seconds: float = 0.0
    working: int = 0


def measure_update(
    layer: nn.Module, index: int, job: JobFile, device: torch.device, watch: Stopwatch
) -> UpdateFacts:
    """Return the facts of the optimizer for a layer; the seconds are those of its second step.

    The parameters of the layer have gradients, and are changed. All facts are 0 for an optimizer
    that cannot train this layer alone, as one for other names.
    """
    try:
        own = dataclasses.replace(job, scheduler=None, before_update=None)
        updater = Updater([layer], index, own)
        optimizers = updater.optimizers
        if not optimizers.all:
            return UpdateFacts()
        optimizers.step()  # they make their state
        begin = watch.mark()
        updater.squares()
        optimizers.step()
        seconds = watch.seconds([begin, watch.mark()])
        states = [dict(state) for one in optimizers.all for state in one.state.values()]
        tensors = distinct_tensors(states)
        parameters = list(layer.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        memory = memory_meter(device)
        memory.know([*tensors, *parameters, *gradients])
        start = memory.restart()
        with memory:
            optimizers.step()
        working = max(0, memory.peak - start)
    except Exception as error:
        log.info("the optimizer of one layer cannot be measured: %s", error)
        return UpdateFacts()
    return UpdateFacts(bytes_of(tensors), seconds, working)
