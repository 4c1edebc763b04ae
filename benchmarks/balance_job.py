"""A job of sleeping layers that take unequal times, for `benchmarks/balance_measured.py`.

Its arguments are the seconds of each layer's forward, as JSON, their number, the bytes of an
activation, and the number of micro-batches. The backward takes twice as long as the forward.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from emulated_job import Sleeping, data, loss, optimizer

__all__ = ["data", "loss", "model", "optimizer"]


def model() -> list[Any]:
    return [partial(Sleeping, seconds) for seconds in json.loads(sys.argv[1])]
