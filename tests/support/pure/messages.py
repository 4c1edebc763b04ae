"""Hypothesis strategies of messages: all values that pass each message's own checks."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.connections import Cached, Existing, Skip, Tie
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.layer_facts import LayerFacts, LayerSkip
from pipeworker.facts.limits import MOST_SAMPLES
from pipeworker.facts.outline import LayerKind, Machine, Outline
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch, Evaluation
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready, StageRange
from pipeworker.wire.messages.presence import Heartbeat, Hello
from pipeworker.wire.messages.profile import Measured
from pipeworker.wire.messages.step import Call, CallKind, EvaluationDone, Loaded, StepDone, Upcoming
from pipeworker.wire.messages.store import StoreOperation, StoreRequest

_MOST = 2**63 - 1
_counts = st.integers(0, _MOST)
_places = st.integers(-1, _MOST)
_floats = st.floats(allow_nan=False)
_texts = st.text(st.characters(codec=None), max_size=20)
_ints = st.integers(-_MOST - 1, _MOST)
_bytes = st.binary(max_size=20)


def _some(of: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[Any]:
    return st.lists(of, min_size=least, max_size=4).map(tuple)


_digests = st.integers(0, (1 << 32) - 1)
_tokens = st.integers(0, MOST_SAMPLES)
_batch = st.builds(
    Batch, _ints, st.integers(1, MOST_SAMPLES), st.integers(1, 1 << 20), _counts, _digests, _tokens
) | st.builds(Batch, _ints, st.just(0), st.just(0), _counts, _digests)
_position = st.builds(Position, st.sampled_from(Phase), _places, _places, _places)
_evaluation = st.lists(st.tuples(_texts, _floats), max_size=4).flatmap(
    lambda pairs: st.builds(
        Evaluation,
        _ints,
        _floats,
        st.just(tuple(name for name, _ in pairs)),
        st.just(tuple(value for _, value in pairs)),
    )
)
_route = st.tuples(st.integers(0, 2), st.integers(2, 3), _texts).map(lambda r: Skip(*r))
_weight = st.tuples(st.integers(0, 3), _texts.filter(bool)).map(lambda w: f"{w[0]}.{w[1]}")
_loaded = st.builds(Loaded, _counts, st.floats(0.0), _counts, _counts)
_squares = _some(st.floats(0.0)) | st.just((math.inf, -math.inf))

_seconds = st.floats(0.0, 1e300)
_layer_facts = st.builds(
    LayerFacts,
    _texts,
    *[_counts] * 4,
    *[_seconds] * 4,
    *[_counts] * 7,
    st.booleans(),
)
_kind = st.builds(
    LayerKind,
    st.text(st.characters(codec="ascii"), min_size=1, max_size=32),
    st.integers(0, 1 << 20),
    _bytes,
    _bytes,
    _some(_texts),
    st.booleans(),
    st.none() | _layer_facts,
)
_layer_skip = st.builds(LayerSkip, st.just(0), st.integers(0, 2), _counts)
_outline = st.builds(
    Outline,
    st.lists(_kind, min_size=2, max_size=3).map(tuple),
    st.lists(st.integers(0, 1), min_size=3, max_size=5).map(tuple),
    st.integers(-1, 1),
    _some(_texts),
    *[_counts] * 3,
    _some(_layer_skip),
    _some(_layer_skip),
)
_machine = st.builds(Machine, _texts, _texts, _counts, _counts)

MADE: dict[Any, st.SearchStrategy[Any]] = {
    Batch: _batch,
    Position: _position,
    Evaluation: _evaluation,
    Hello: st.builds(Hello, _ints, _texts, _counts),
    Built: st.builds(Built, _counts, _counts, _some(_texts), _counts),
    Described: st.builds(
        Described,
        _ints,
        st.lists(_texts, min_size=4, max_size=6).map(tuple),
        _some(_route),
        _some(st.builds(Tie, _some(_weight, 1), _some(_ints))),
        _ints,
        _some(_texts),
        notes=_some(_texts),
        settings=_some(_texts),
        machine=st.none() | _machine,
        frozen=st.sets(st.integers(0, 3)).map(lambda some: tuple(sorted(some))),
        problem=_texts,
    ),
    Plan: st.builds(
        Plan,
        _some(st.builds(StageRange, _ints, _ints, _ints, _texts)),
        _some(_texts),
        _some(_route),
        _some(st.builds(Tie, _some(_weight, 1), _some(_ints))),
        _texts,
        st.sampled_from([(), ((0,), (1,)), ((0, 3), (1, 2))]),
        _some(_texts),
        _counts,
    ),
    Failure: st.builds(
        Failure,
        st.sampled_from(Cause),
        _texts,
        _ints,
        _position,
        _texts,
        _texts,
        _texts,
        st.integers(0, 255),
    ),
    Upcoming: st.builds(Upcoming, _ints, st.integers(1, 1 << 20)),
    StepDone: st.lists(st.tuples(_floats, _floats), max_size=4).flatmap(
        lambda pairs: st.builds(
            StepDone,
            _ints,
            _ints,
            st.just(tuple(loss for loss, _ in pairs)),
            st.sampled_from([(), tuple(count for _, count in pairs)]),
            _squares,
            st.floats(0.0),
            _floats,
            _counts,
            st.none() | _batch,
            _places,
            st.floats(0.0),
            data_seconds=st.floats(0.0),
        )
    ),
    Loaded: _loaded,
    Call: st.sampled_from(CallKind).flatmap(
        lambda kind: st.builds(
            Call,
            _ints,
            st.just(kind),
            st.none() | _batch,
            st.booleans(),
            st.booleans(),
            _loaded if kind is CallKind.LOAD else st.none(),
        )
    ),
    EvaluationDone: st.builds(EvaluationDone, _ints, _ints, _counts, st.none() | _evaluation),
    CheckpointFile: st.builds(
        CheckpointFile, _texts.map(lambda t: t.replace("/", "")), _counts, st.integers(0, 9)
    ),
    Ready: st.builds(
        Ready,
        _ints,
        _some(st.builds(Built, _counts, st.just(0), _some(_texts, 4), _counts), 1),
        _texts,
        st.none() | _batch,
        existing=_some(st.builds(Existing, _weight, _texts)),
        cached=_some(st.builds(Cached, _texts, _texts, _ints)),
    ),
    Heartbeat: st.builds(
        Heartbeat,
        _ints,
        _position,
        _counts,
        _counts,
        st.booleans(),
        _counts,
        _counts,
        _counts,
        _counts,
    ),
    LayerKind: _kind,
    Outline: _outline,
    Machine: _machine,
    LayerFacts: _layer_facts,
    Measured: st.lists(st.tuples(_texts, _layer_facts), max_size=3).flatmap(
        lambda pairs: st.builds(
            Measured,
            _ints,
            st.just(tuple(digest for digest, _ in pairs)),
            st.just(tuple(facts for _, facts in pairs)),
            st.none() | _outline,
            _texts,
            _seconds,
        )
    ),
    StoreRequest: st.builds(
        StoreRequest,
        _ints,
        _ints,
        st.sampled_from(StoreOperation),
        _some(_texts),
        _bytes,
    ),
}
"""The strategies of classes that reject some values of the right types."""

for _kind, _made in MADE.items():
    st.register_type_strategy(_kind, _made)
