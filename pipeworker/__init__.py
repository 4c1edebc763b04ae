"""pipeworker: pipeline-parallel training with the same numbers for any number of stages."""

from pipeworker.errors import (
    LayerError,
    PeerLost,
    PipeworkerError,
    ProtocolError,
    ScheduleError,
    UsageError,
)

__version__ = "0.1.0"

__all__ = [
    "LayerError",
    "PeerLost",
    "PipeworkerError",
    "ProtocolError",
    "ScheduleError",
    "UsageError",
    "__version__",
]
