"""Why a rank failed, where torchrun looks for it: its summary shows it, and who reads that one.

A file of JSON as ``torch.distributed.elastic.multiprocessing.errors.record`` writes it, at the path
that the environment names. What is shown of it is the text with which the job itself names stage,
layer, micro-batch and step, rather than frames of ours.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def wanted() -> bool:
    """Whether there is to be one, and nothing is in it yet."""
    path = os.environ.get(_VARIABLE)
    return bool(path) and not Path(path or "").exists()


def write(message: str, shown: str = "") -> None:
    """Say why this rank fails, if it is wanted.

    Args:
        message: in a line or a few.
        shown: with the user's traceback.
    """
    if not wanted():
        return
    said = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": shown or message, "timestamp": str(int(time.time()))},
        }
    }
    with suppress(OSError):  # what is wrong is said elsewhere too
        Path(os.environ[_VARIABLE]).write_text(json.dumps(said), encoding="utf-8")
