"""Optimizers that combine parameters: those of a stage, so that numbers depend on the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.worker.update.independence import combines_parameters, note_of


class Descent(torch.optim.Optimizer):
    """Descends by the gradients, divided by what `share` makes of all of them."""

    def __init__(self, params: Any, lr: float = 0.1, limit: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "limit": limit})

    def norm(self, gradients: list[torch.Tensor]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = max(self.norm([p.grad for p in group["params"]]), group["limit"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / norm)


class Bounded(Descent):
    """Bounds the common norm of all gradients, as LAMB does."""

    def norm(self, gradients: list[torch.Tensor]) -> float:
        return float(torch.stack([g.norm() for g in gradients]).norm())


class Noisy(Descent):
    """Draws random numbers for each parameter."""

    def norm(self, gradients: list[torch.Tensor]) -> float:
        return float(torch.rand(len(gradients))[0])


class Talking(Descent):
    """Takes what is no setting, which is unknown here."""

    def __init__(self, params: Any, name: str) -> None:
        print(name)
        super().__init__(params)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda params: torch.optim.AdamW(params), False),
        (lambda params: Descent(params), False),
        (lambda params: Bounded(params), True),
        (lambda params: Bounded(params, limit=1e9), False),
        (lambda params: Noisy(params), False),
        (lambda params: Talking(params, "a"), False),
    ],
)
def test_whether_a_parameter_beside_another_is_updated_otherwise(
    made: Callable[[Any], torch.optim.Optimizer], expected: bool
) -> None:
    layer = nn.Linear(3, 3)
    optimizer = made(layer.parameters())
    before = [p.detach().clone() for p in layer.parameters()]
    state = torch.get_rng_state()
    assert combines_parameters(optimizer) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, layer.parameters()))
    assert note_of(optimizer).startswith("Bounded: combines the parameters") == expected
