"""Dynamic loss scaling for fp16: one scale for all stages.

Small gradients vanish in fp16, so the loss is multiplied by a scale and the update divided by it
(Micikevicius et al. 2017). The scale doubles after a number of good steps and halves after an
overflow, with the constants of torch.amp.GradScaler. It is always a power of two, so that scaling
changes no bit of what does not overflow or vanish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_GROWTH_INTERVAL = 2000
_MOST = 2.0**24
_LEAST = 2.0**-24


@dataclass(frozen=True, slots=True)
class Scaler:
    """The scale, and the steps without an overflow since it last changed."""

    scale: float = 2.0**16
    good_steps: int = 0

    def after(self, *, overflow: bool) -> Scaler:
        """The next step's."""
        if overflow:
            return Scaler(max(self.scale / 2, _LEAST))
        if self.good_steps + 1 == _GROWTH_INTERVAL:
            return Scaler(min(self.scale * 2, _MOST))
        return replace(self, good_steps=self.good_steps + 1)
