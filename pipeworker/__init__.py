"""pipeworker: pipeline-parallel training with the same numbers for any number of stages.

What a job file or a script may call is loaded when it is first asked for: importing this package
does not import torch.
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

if TYPE_CHECKING:
    from pipeworker.session.pipeline import Pipeline, train
    from pipeworker.wire.messages.step import StepResult
    from pipeworker.worker.stage.recompute import is_recomputing
    from pipeworker.worker.stage.skips import namespace, pop, stash

__version__ = "0.1.0"

__all__ = [
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
    "is_recomputing",
    "namespace",
    "pop",
    "stash",
    "train",
]

_LAZY = {
    "Pipeline": "pipeworker.session.pipeline",
    "StepResult": "pipeworker.wire.messages.step",
    "train": "pipeworker.session.pipeline",
    "is_recomputing": "pipeworker.worker.stage.recompute",
    "namespace": "pipeworker.worker.stage.skips",
    "pop": "pipeworker.worker.stage.skips",
    "stash": "pipeworker.worker.stage.skips",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
