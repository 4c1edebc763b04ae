"""A module that is built in part: which of its parameters are one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeworker.worker.internals import is_fake
from pipeworker.worker.stage.cut.building import build_hollow, build_part

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
