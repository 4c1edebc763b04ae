"""Partitions: the layers of each stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import UsageError
from pipeworker.facts.connections import SharedBuffer
from pipeworker.plan.partition import (
    block,
    check_balance,
    check_entries,
    cuts,
    even,
    nearest,
    parse_balance,
    ranges,
    sizes,
)

balances = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(tuple)


@pytest.mark.parametrize(
    ("layers", "stages", "balance"),
    [(1, 1, (1,)), (5, 2, (3, 2)), (11, 4, (3, 3, 3, 2)), (4, 4, (1, 1, 1, 1)), (8, 3, (3, 3, 2))],
)
def test_even(layers: int, stages: int, balance: tuple[int, ...]) -> None:
    assert even(layers, stages) == balance


@given(count=st.integers(0, 60), parts=st.integers(0, 70))
def test_sizes_are_those_of_the_blocks(count: int, parts: int) -> None:
    assert sizes(count, parts) == [len(block(count, parts, part)) for part in range(parts)]


@given(stages=st.integers(1, 20), more=st.integers(0, 60))
def test_even_gives_extra_layers_to_the_first_stages(stages: int, more: int) -> None:
    balance = even(stages + more, stages)
    assert check_balance(balance, ["Linear"] * (stages + more), stages) == balance
    assert max(balance) - min(balance) <= 1
    assert list(balance) == sorted(balance, reverse=True)


@given(
    layers=st.integers(1, 30),
    stages=st.integers(1, 6),
    spans=st.lists(st.tuples(st.integers(0, 28), st.integers(1, 29)), max_size=4),
)
def test_even_parts_no_layers_that_share_a_buffer(
    layers: int, stages: int, spans: list[tuple[int, int]]
) -> None:
    shared = [SharedBuffer(a, b) for a, b in spans if a < b < layers]
    possible = cuts(layers, shared)
    assert possible == [
        n for n in range(1, layers) if not any(s.first < n <= s.last for s in shared)
    ]
    if len(possible) < stages - 1:
        with pytest.raises(UsageError, match=f"^--stages {stages}: more than the "):
            even(layers, stages, shared=shared)
        return
    balance = even(layers, stages, shared=shared)
    assert check_balance(balance, ["Linear"] * layers, stages, shared) == balance
    if not shared:
        assert balance == even(layers, stages)


def test_the_nearest_cuts_are_chosen() -> None:
    assert nearest((4, 4, 4), [1, 5, 6, 11]) == (5, 1, 6)
    assert nearest((4, 4, 4), [10, 11]) == (10, 1, 1)
    assert nearest((4, 4, 4), [1, 2]) == (1, 1, 10)
    assert nearest((12,), []) == (12,)


def test_even_needs_a_layer_per_stage() -> None:
    with pytest.raises(UsageError, match=r"^--stages 3: .* model\(\), 2; use --stages 2 or fewer"):
        even(2, 3)
    several = (
        r"^--stages 4: with 2 stages on each worker, more stages than the layers of model\(\), 7; "
        "use --stages 3 or fewer, or split the layers more finely$"
    )
    with pytest.raises(UsageError, match=several):
        even(7, 8, 2)
    with pytest.raises(UsageError, match=r"^--stages 1: .* model\(\), 2; split the layers more"):
        even(2, 3, 3)


@given(balances)
def test_parse_reads_the_text_of_a_balance(balance: tuple[int, ...]) -> None:
    assert parse_balance(",".join(map(str, balance))) == balance


@pytest.mark.parametrize("text", ["", "3,,5", "a", "3;5", "2.5", "3,5,"])
def test_parse_rejects(text: str) -> None:
    with pytest.raises(UsageError, match="one positive number for each stage") as caught:
        parse_balance(text)
    assert str(caught.value).startswith(f"--balance {text!r}: not a list of layer counts")


@pytest.mark.parametrize("balance", [(), (0,), (3, 0), (-1, 3), (0, 0)])
def test_every_stage_has_a_layer(balance: tuple[int, ...]) -> None:
    shown = ",".join(map(str, balance))
    for stages in (len(balance), 2, 5):
        with pytest.raises(UsageError, match="one positive number for each stage") as caught:
            check_entries(balance, stages)
        assert str(caught.value).startswith(f"--balance {shown!r}: not a list of layer counts")


def test_a_balance_has_an_entry_for_each_stage() -> None:
    with pytest.raises(UsageError, match="--balance 1,1: is for 2 stages, but there is 1; write"):
        check_entries((1, 1), 1)
    with pytest.raises(UsageError, match="--balance 2: is for 1 stage, but there are 3; write"):
        check_entries((2,), 3)


def test_a_balance_must_fit_the_job() -> None:
    assert check_balance((3, 2), ["Linear"] * 5, 2) == (3, 2)
    with pytest.raises(UsageError, match="3,2: is for 2 stages, but there are 3"):
        check_balance((3, 2), ["Linear"] * 5, 3)
    with pytest.raises(UsageError, match=r"3,2: adds up to 5 layers, but model\(\) has 6"):
        check_balance((3, 2), ["Linear"] * 6, 2)


@given(balances)
def test_ranges_cover_every_layer_once_in_order(balance: tuple[int, ...]) -> None:
    owned = [list(range(first, stop)) for first, stop in ranges(balance)]
    assert [layer for layers in owned for layer in layers] == list(range(sum(balance)))
    assert tuple(map(len, owned)) == balance
