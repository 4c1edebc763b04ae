"""Cut modules whose forward depends on the mode between units: evaluation passes are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeworker.errors import UsageError
from pipeworker.worker.stage.cut.part import Cut, plan_of
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.transport.structure import NO_TYPES
from support.in_process.cut_modules import CPU, WIDTH


class Coder(nn.Module):
    """A variational autoencoder, which draws its code in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        mean, spread = self.mean(x), self.spread(x)
        code = mean + torch.randn_like(mean) * spread.exp() if self.training else mean
        return self.decode(code), mean, spread


class Scaled(Coder):
    """Has another operation behind its last unit in training."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.decode(self.spread(self.mean(x)))
        return out * 2 if self.training else out


class Shorter(Coder):
    """Leaves its last unit out in eval mode."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.spread(self.mean(x))
        return self.decode(out) if self.training else out


class Graded(Coder):
    """Has another operation where gradients are wanted, which no evaluation pass does."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.decode(self.spread(self.mean(x)))
        return out * 2 if torch.is_grad_enabled() else out


class Dropping(Coder):
    """Has the same operations in both modes, with other arguments, and draws numbers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            torch.rand(1)
        else:
            torch.rand(2)
        out = functional.dropout(self.mean(x), 0.5, training=self.training)
        return self.decode(self.norm(self.drop(self.spread(out))))


class Failing(Coder):
    """Raises in eval mode, as for a mini-batch of another form than evaluations have."""

    def forward(self, x: torch.Tensor) -> Any:
        if not self.training:
            raise ValueError("this mini-batch has no label")
        return self.decode(self.spread(self.mean(x)))


DIFFERENT = [
    (Coder, r"layer 2 \(decode\): .*it has 3 operations up to decode, and had 7"),
    (Scaled, r"layer 2 \(decode\): .*it has 3 operations in all, and had 4"),
    (Graded, r"layer 2 \(decode\): .*it has 3 operations in all, and had 4"),
    (Shorter, r"layer 2 \(decode\): .*it ends early"),
]


def planned(kind: type[Coder], *, evaluates: bool) -> tuple[nn.Module, CutPlan]:
    module = kind()
    return module, plan_of(module, NO_TYPES, torch.randn(4, WIDTH), evaluates=evaluates)


@pytest.mark.parametrize(("kind", "message"), DIFFERENT)
def test_a_way_of_its_own_in_eval_mode_is_refused_if_the_job_evaluates(
    kind: type[Coder], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        planned(kind, evaluates=True)
    assert "takes another way than when it was cut, in eval mode" in str(error.value)
    assert "have a module with parameters of its own" in str(error.value)
    assert len(planned(kind, evaluates=False)[1]) == 3


class Checked(Coder):
    """Looks at an activation in eval mode, which a stage that does not compute it cannot do."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.spread(self.mean(x))
        if not self.training and bool((out > 1e9).any()):
            raise ValueError("it diverges")
        return self.decode(out)


class Listed(Coder):
    """Does so by a method that counts as no operation."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.spread(self.mean(x))
        if not self.training:
            out.numpy()
        return self.decode(out)


@pytest.mark.parametrize("kind", [Checked, Listed])
def test_the_numbers_of_an_activation_are_refused_in_eval_mode_too(kind: type[Coder]) -> None:
    reason = (
        r"layer 2 \(decode\): .*, in eval mode: it needs the numbers of an activation, at test_"
    )
    with pytest.raises(UsageError, match=reason):
        planned(kind, evaluates=True)
    assert len(planned(kind, evaluates=False)[1]) == 3


@pytest.mark.parametrize("kind", [Dropping, Failing])
def test_the_same_operations_in_both_modes_and_an_error_of_the_user_are_no_reason_to_refuse(
    kind: type[Coder],
) -> None:
    module, batch = kind(), torch.randn(4, WIDTH)
    drawn = torch.get_rng_state()
    plan = plan_of(module, NO_TYPES, batch, evaluates=True)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert plan == plan_of(module, NO_TYPES, torch.randn(4, WIDTH))
    assert all(one.training for one in module.modules())


@pytest.mark.parametrize(("kind", "message"), DIFFERENT)
def test_an_evaluation_that_takes_another_way_is_an_error_that_names_the_mode(
    kind: type[Coder], message: str
) -> None:
    module, plan = planned(kind, evaluates=False)
    parts = Cut(copy.deepcopy(module), NO_TYPES, CPU, plan).parts_of(module)
    stages = nn.Sequential(*parts.values()).eval()
    with pytest.raises(UsageError, match=message) as error, torch.no_grad():
        stages(torch.randn(4, WIDTH))
    assert "in eval mode" in str(error.value)
