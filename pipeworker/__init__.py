"""Pipeline-parallel training with bitwise equal results for any number of stages.

Public names whose modules import torch are loaded at their first use: importing this package does
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeworker.errors import (
    LayerError,
    PeerLost,
    PipeworkerError,
    ProtocolError,
    ScheduleError,
    SkipError,
    UsageError,
)
from pipeworker.version import __version__

if TYPE_CHECKING:
    from pipeworker.facts.step import StepResult
    from pipeworker.session.launched import LaunchResult, launch
    from pipeworker.session.pipeline import Pipeline
    from pipeworker.session.train import train
    from pipeworker.worker.stage.language import causal_loss
    from pipeworker.worker.stage.recompute import is_recomputing
    from pipeworker.worker.stage.skips import namespace, pop, stash

__all__ = [
    "LaunchResult",
    "LayerError",
    "PeerLost",
    "Pipeline",
    "PipeworkerError",
    "ProtocolError",
    "ScheduleError",
    "SkipError",
    "StepResult",
    "UsageError",
    "__version__",
    "causal_loss",
    "is_recomputing",
    "launch",
    "namespace",
    "pop",
    "stash",
    "train",
]

_LAZY = {
    "LaunchResult": "pipeworker.session.launched",
    "Pipeline": "pipeworker.session.pipeline",
    "StepResult": "pipeworker.facts.step",
    "train": "pipeworker.session.train",
    "launch": "pipeworker.session.launched",
    "causal_loss": "pipeworker.worker.stage.language",
    "is_recomputing": "pipeworker.worker.stage.recompute",
    "namespace": "pipeworker.worker.stage.skips",
    "pop": "pipeworker.worker.stage.skips",
    "stash": "pipeworker.worker.stage.skips",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
