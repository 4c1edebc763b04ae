"""Another job file under a limit of memory that the kernel enforces.

Its arguments are the path of that file, the MiB that a worker may have for its weights, gradients,
optimizer states and activations, and the other file's arguments. What else a worker has before it
makes its optimizer, the interpreter and torch, does not count: an accelerator does not have it.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from parts import load_job

_FILE, _MIB, *_WORDS = sys.argv[1:]
_job = load_job(_FILE, _WORDS)
model, loss = _job.model, _job.loss


def optimizer(params: Iterator[torch.Tensor]) -> Any:
    """Limit the private memory of this process to what it is without these weights, and MIB."""
    every = list(params)
    weights = sum(param.numel() * param.element_size() for param in every)
    found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    limit = int(found[1]) * 1024 - weights + int(_MIB) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    return _job.optimizer(every)


def data() -> Iterator[Any]:
    """Yield two mini-batches: the second step has the optimizer's states from its begin."""
    return islice(_job.data(), 2)
