"""The user's process: its program, and the modes of torch that it has entered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch


def script_path() -> str:
    """Return the path of the running program, which is the job's file."""
    name = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script"
    return str(Path(name).resolve())


@contextmanager
def plain_modes() -> Iterator[None]:
    """Leave the modes that the user's code has entered: the job's numbers depend on none."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        current = torch.accelerator.current_accelerator()
        for device in ("cpu", *([current.type] if current else [])):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
