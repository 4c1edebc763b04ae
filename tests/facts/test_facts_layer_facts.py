"""Facts of networks, and impossible ones, as a damaged file may have them."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from pipeworker.facts.connections import SharedBuffer
from pipeworker.facts.layer_facts import LayerSkip, NetworkFacts
from support.pure.facts import layer

FACTS = NetworkFacts(
    (layer(), layer()),
    skips=(LayerSkip(0, 1, 5),),
    ties=(LayerSkip(1, 0, 5),),
    shared_buffers=(SharedBuffer(0, 1),),
    speeds=(1.0, 0.5),
    limits=(None, 7),
)


def test_facts_may_have_all_numbers_of_a_network() -> None:
    assert FACTS.is_possible
    assert NetworkFacts((layer(0.0, 0.0),)).is_possible


@pytest.mark.parametrize(
    "changes",
    [
        {"latency": -1.0},
        {"loss": inf},
        {"handling": nan},
        {"limits": (None, -7)},
        {"speeds": (1.0, 0.0)},
        {"layers": (layer(), layer(-1.0))},
        {"layers": (layer(),)},
        {"skips": (LayerSkip(0, 1, -5),)},
        {"skips": (LayerSkip(0, 2, 5),)},
        {"ties": (LayerSkip(-1, 1, 5),)},
        {"ties": (LayerSkip(2, 1, 5),)},
        {"shared_buffers": (SharedBuffer(-1, 1),)},
        {"shared_buffers": (SharedBuffer(0, 2),)},
    ],
)
def test_numbers_that_no_network_has_are_not_possible(changes: dict[str, Any]) -> None:
    assert not replace(FACTS, **changes).is_possible


def test_the_operations_of_a_sample_are_those_of_all_layers() -> None:
    facts = NetworkFacts((layer(flops=6), layer(flops=4)), samples=5)
    assert facts.flops_per_sample == 2
    assert replace(facts, samples=0).flops_per_sample == 10
