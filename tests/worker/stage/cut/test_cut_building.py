"""A module that is built in part: its parameters have the numbers of the whole module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.worker.internals import is_fake
from pipeworker.worker.stage.cut.building import NeedsWhole, build_hollow, build_part

ORDER = ["", "first.weight", "", "middle.bias", "middle.weight", ""]
"""Linear layers have weights of their own until others are assigned."""


class Tied(nn.Module):
    """Registers one parameter from a local variable in two places."""

    def __init__(self) -> None:
        super().__init__()
        weight, own = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
        self.first = nn.Linear(3, 3, bias=False)
        self.first.weight = weight
        self.middle = nn.Linear(3, 3)
        self.middle.weight = own
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = weight


@pytest.mark.parametrize(
    "owned", [["first.weight"], ["middle.weight"], [], ["first.weight", "middle.bias"]]
)
def test_a_parameter_of_a_local_variable_is_one_wherever_it_is_registered(owned: list[str]) -> None:
    torch.manual_seed(5)
    whole = Tied()
    torch.manual_seed(5)
    hollow, order = build_hollow(Tied)
    assert hollow.first.weight is hollow.last.weight
    assert order == ORDER
    torch.manual_seed(5)
    part = build_part(Tied, order, owned)
    assert part.get_parameter("first.weight") is part.get_parameter("last.weight")
    for name, value in part.named_parameters():
        assert is_fake(value) != (name in owned)
        assert is_fake(value) or torch.equal(value, whole.get_parameter(name)), name


class Filled(nn.Module):
    """The first weight is filled in a way of its own; the second layer draws after it."""

    def __init__(self, fill: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(33, 17)
        with torch.no_grad():
            fill(self.first.weight)
        self.second = nn.Linear(5, 7)


def second_of(fill: Callable[[torch.Tensor], Any]) -> nn.Module:
    _, order = build_hollow(lambda: Filled(fill))
    torch.manual_seed(5)
    return build_part(lambda: Filled(fill), order, ["second.weight", "second.bias"])


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.normal_,
        lambda weight: nn.init.normal_(weight.t()),
        lambda weight: nn.init.normal_(weight[:, :20]),
        lambda weight: nn.init.normal_(weight[3]),
        lambda weight: nn.init.trunc_normal_(weight.t()),
        lambda weight: nn.init.trunc_normal_(weight, std=0.02),
        lambda weight: nn.init.trunc_normal_(weight, a=1.5, b=1.6),
        lambda weight: weight.t().exponential_(),
        lambda weight: weight.t().copy_(torch.randn_like(weight.t())),
        lambda weight: weight.bernoulli_(0.5),
    ],
)
def test_what_is_drawn_behind_a_weight_does_not_depend_on_who_has_it(fill: Any) -> None:
    torch.manual_seed(5)
    whole = Filled(fill)
    part = second_of(fill)
    for name in ("second.weight", "second.bias"):
        assert torch.equal(part.get_parameter(name), whole.get_parameter(name))


@pytest.mark.parametrize(
    "fill",
    [
        lambda weight: torch.bernoulli(weight.sigmoid()),
        lambda weight: torch.normal(weight, 1.0),
        lambda weight: weight.bernoulli_(weight.sigmoid()),
    ],
)
def test_numbers_that_are_drawn_by_those_of_a_weight_need_the_whole_module(fill: Any) -> None:
    with pytest.raises(NeedsWhole, match="draws by the numbers of a parameter"):
        second_of(fill)
