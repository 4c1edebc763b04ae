"""Dynamic loss scaling for fp16: one scale for all stages. Pure.

Small gradients underflow in fp16, so the loss is multiplied by a scale and the update divided by it
(Micikevicius et al. 2017). The scale doubles after a number of good steps and halves after an
overflow, with the constants of torch.amp.GradScaler. It is always a power of two, so scaling
changes no bit of a value that neither overflows nor underflows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_GROWTH_INTERVAL = 2000
_MAX_SCALE = 2.0**24
_MIN_SCALE = 2.0**-24


@dataclass(frozen=True, slots=True)
class LossScaler:
    """The scale, and the steps without an overflow since it last changed."""

    scale: float = 2.0**16
    good_steps: int = 0

    @property
    def is_least(self) -> bool:
        """Whether no overflow makes the scale smaller."""
        return self.scale <= _MIN_SCALE

    def after(self, *, overflow: bool) -> LossScaler:
        """Return the state after a step that did or did not overflow."""
        if overflow:
            return LossScaler(max(self.scale / 2, _MIN_SCALE))
        if self.good_steps + 1 == _GROWTH_INTERVAL:
            return LossScaler(min(self.scale * 2, _MAX_SCALE))
        return replace(self, good_steps=self.good_steps + 1)
