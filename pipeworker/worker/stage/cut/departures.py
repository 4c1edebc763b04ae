"""The attributes of modules around units where a stage leaves a forward: its next one begins there.

A forward that sets a flag before some units and resets it behind them never resets it on a stage
that ends between them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from pipeworker.worker.stage.cut.common import CommonVariables
from pipeworker.worker.stage.cut.isolation import changed_path, held_by_modules

_MOST = 8
"""Layers behind which a forward is left at most."""


class Departures:
    """The attributes around the units of a module, and the common variables, behind each layer."""

    def __init__(
        self, module: nn.Module, units: Collection[nn.Module], common: CommonVariables
    ) -> None:
        inside = {id(one) for unit in units for one in unit.modules()}
        self._around = [(n, one) for n, one in module.named_modules() if id(one) not in inside]
        self._common = common
        self._behind: list[dict[Any, list[Any]]] = []

    def note(self) -> None:
        """Note what they hold behind a layer, or, in the end, behind the forward."""
        self._behind.append(held_by_modules(self._around) | self._common.shown())

    def layers(self) -> list[int]:
        """Return the layers behind which they hold something else than behind the forward."""
        of_units = self._common.changed
        *behind, end = (
            {key: value for key, value in held.items() if key not in of_units}
            for held in self._behind
        )
        found: list[int] = []
        known = [end]
        for layer, held in enumerate(behind[:-1]):
            if len(found) < _MOST and all(changed_path(one, held) is not None for one in known):
                found.append(layer)
                known.append(held)
        return found
