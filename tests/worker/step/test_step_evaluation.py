"""Eval mode, which restores each module."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from pipeworker.worker.step.evaluation import eval_mode


class Merging(nn.Linear):
    """A layer whose mode is more than a flag."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_a_module_with_its_own_train_is_told_that_the_pass_has_ended() -> None:
    net = nn.Sequential(Merging(1, 1), nn.Sequential(Merging(1, 1).eval()), Merging(1, 1))
    with suppress(KeyError), eval_mode([net]):
        assert [module.merged for module in net.modules() if isinstance(module, Merging)] == [
            True
        ] * 3
        raise KeyError
    merging = [module for module in net.modules() if isinstance(module, Merging)]
    assert [(one.merged, one.training) for one in merging] == [
        (False, True),
        (True, False),
        (False, True),
    ]


def test_eval_mode_restores_each_module() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    net = nn.Sequential(nn.Dropout(), inner)
    inner[0].eval()
    with suppress(KeyError), eval_mode([net[0], net[1]]):
        assert not any(module.training for module in net[1].modules())
        assert not torch.is_grad_enabled()
        raise KeyError
    assert torch.is_grad_enabled()
    assert [net[0].training, net[1].training] == [True, True]
    assert [inner[0].training, inner[1].training] == [False, True]
