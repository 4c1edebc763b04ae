"""Drawn modules, cut into layers: the module's own bits for any stages, or refused for any."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeworker.errors import UsageError
from pipeworker.plan.placement import Placement
from support.draws import draws
from support.in_process.cut_modules import Whole, cut, mse, sgd
from support.in_process.drawn_modules import WIDTH, Drawn, modules
from support.in_process.pipelines import Pipeline, filled
from support.in_process.plain_loop import Batches, Trained, assert_equal, plain

WAYS = ((1, "never"), (2, "always"), (3, "never"))


def run(module: Drawn, batches: Batches, stages: int, mode: str) -> Trained | str:
    """Train two steps in a pipeline; return why it is refused, if it is."""
    module, batches = copy.deepcopy((module, batches))
    try:
        plan, layers = cut(module, batches[0])
        way = filled(Placement.identity(min(stages, len(layers))), mode)
        pipeline = Pipeline(
            layers, mse, batches, way, microbatches=2, skips=plan.skips(), optimizer=sgd
        )
        return pipeline.train(2)
    except UsageError as error:
        return str(error)


def test_a_drawn_module_has_its_own_bits_or_is_refused() -> None:
    outcomes: Counter[str] = Counter()

    @given(modules(), st.integers(0, 1 << 20))
    @settings(max_examples=draws(6), suppress_health_check=[*HealthCheck], deadline=None)
    def train(module: Drawn, seed: int) -> None:
        torch.manual_seed(seed)
        batches = [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(2)]
        try:
            expected = plain([Whole(copy.deepcopy(module))], mse, copy.deepcopy(batches), 2, sgd)
        except RuntimeError:  # a change in place of what backward needs
            outcomes["fails in one process too"] += 1
            return
        first, *others = (run(module, batches, stages, mode) for stages, mode in WAYS)
        if isinstance(first, str):
            outcomes["refused"] += 1
            assert all(isinstance(other, str) for other in others), first
            return
        for other in others:
            assert not isinstance(other, str), other
            assert_equal(other, first)
        outcomes["runs"] += 1
        if not module.is_random:
            for found, wanted in zip(first.losses, expected.losses, strict=True):
                shared = module.has_shared_parameters
                assert found == (pytest.approx(wanted, rel=1e-4) if shared else wanted)

    train()
    assert outcomes["runs"] > outcomes.total() / 4, outcomes
