"""The accelerators of a host, as torch sees them: of any kind, by its own name."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Accelerators(Protocol):
    """What is asked of them. A process has those of one kind."""

    @property
    def kind(self) -> str:
        """What torch calls such a device; empty where there is none."""

    @property
    def count(self) -> int:
        """How many this process may use: a scheduler may show each of its tasks another one."""

    def take(self, index: int) -> None:
        """Compute on this one unless it is said otherwise."""

    def unit(self, index: int) -> str:
        """Which one it is, whatever its number in this process, as far as torch can tell."""


class TorchAccelerators:
    """Those that ``torch.accelerator`` sees."""

    @property
    def kind(self) -> str:
        current = torch.accelerator.current_accelerator(check_available=True)
        return current.type if current is not None and torch.accelerator.device_count() else ""

    @property
    def count(self) -> int:
        return torch.accelerator.device_count()

    def take(self, index: int) -> None:
        torch.accelerator.set_device_index(index)

    def unit(self, index: int) -> str:
        kind = self.kind
        properties = getattr(module_of(kind), "get_device_properties", None)
        uuid: Any = getattr(properties(index), "uuid", None) if properties else None
        return f"{kind}:{index}" if uuid is None else str(uuid)


def module_of(kind: str) -> Any:
    """What torch has for a kind of device beside tensors, as ``torch.cuda``."""
    return torch.get_device_module(kind)
