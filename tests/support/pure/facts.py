"""Facts of networks that no worker has measured, for tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pipeworker.facts.layer_facts import LayerFacts, LayerSkip, NetworkFacts
from pipeworker.plan.orders import ORDERS


def layer(forward: float = 1.0, backward: float = 2.0, **others: Any) -> LayerFacts:
    """Return a layer that takes these seconds, half of the backward for the input."""
    made = LayerFacts("Linear", forward=forward, backward=backward, backward_input=backward / 2)
    return replace(made, **others)


def network(
    layers: Sequence[LayerFacts], limit: int | None = None, workers: int = 0
) -> NetworkFacts:
    """Return the facts of layers for workers of the same limit."""
    return NetworkFacts(tuple(layers), limits=(limit,) * workers)


SPLIT_ORDERS = ("dualpipev", "v-half", "v-min", "zb-h1", "zbv")
"""Orders that split backwards: they depend on what is recomputed."""
DRAWN_ORDERS = st.sampled_from([ORDERS[name] for name in sorted({*ORDERS} - {*SPLIT_ORDERS})])
_SECONDS = st.integers(1, 40).map(lambda n: n / 8)
_BYTES = st.integers(0, 200)
LAYERS = st.builds(
    LayerFacts,
    kind=st.just("Linear"),
    parameter_bytes=_BYTES,
    gradient_bytes=_BYTES,
    optimizer_bytes=_BYTES,
    forward=_SECONDS,
    backward=_SECONDS,
    backward_input=st.just(0.125),
    update=_SECONDS,
    update_bytes=_BYTES,
    deferred_bytes=_BYTES,
    saved_bytes=_BYTES,
    saved_input_bytes=_BYTES,
    saved_output_bytes=_BYTES,
    working_bytes=_BYTES,
    output_bytes=_BYTES,
    passes_gradient=st.booleans(),
)


@st.composite
def networks(draw: st.DrawFn, least: int = 4, most: int = 9, workers: int = 4) -> NetworkFacts:
    """Draw the facts of a network, with skips, ties, transfers and unequal workers; no limits."""
    layers = tuple(draw(st.lists(LAYERS, min_size=least, max_size=most)))
    last = len(layers) - 1
    pairs = st.tuples(st.integers(0, last), st.integers(0, last)).filter(lambda p: p[0] < p[1])
    skips, ties = (
        tuple(LayerSkip(*pair, draw(_BYTES)) for pair in draw(st.lists(pairs, max_size=2)))
        for _ in range(2)
    )
    return NetworkFacts(
        layers,
        input_bytes=draw(_BYTES),
        target_bytes=draw(_BYTES),
        loss=draw(_SECONDS),
        skips=skips,
        ties=ties,
        speeds=tuple(draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(workers)),
        base_bytes=draw(_BYTES),
        latency=draw(st.sampled_from([0.0, 0.25])),
        seconds_per_byte=draw(st.sampled_from([0.0, 0.015625])),
        handling=draw(st.sampled_from([0.0, 0.03125])),
        loss_saved_bytes=draw(_BYTES),
        loss_saved_input_bytes=draw(_BYTES),
        loss_working_bytes=draw(_BYTES),
        copies=draw(st.integers(0, 2)),
        maps_frames=draw(st.booleans()),
        updates_at_once=draw(st.booleans()),
    )
