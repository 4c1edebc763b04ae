"""The names of layers and of the parameters in them, in the user's module and by index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ProtocolError, UsageError
from pipeworker.facts.layer_names import (
    LayerNames,
    is_numbered,
    layer_of,
    numbered,
    shown,
    split_numbered,
)

DEEP = LayerNames(("model.embed", "model.layers.0", "model.layers.1", "model.layers.10", "head"))
NESTED = LayerNames(("block", "block.1", "block.1.a", "b"))
WORDS = st.text(st.characters(codec="ascii", exclude_characters="."), min_size=1, max_size=3)
PATHS = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


def test_layers_given_as_a_list_are_named_by_their_indices() -> None:
    names = LayerNames.numbered(11)
    assert names.prefixes[:2] == ("0", "1")
    assert len(names) == 11
    assert names.split("10.a.weight") == (10, "a.weight")
    assert names.parameter(10, "a.weight") == names.of_numbered("10.a.weight") == "10.a.weight"


def test_a_prefix_may_hold_dots() -> None:
    assert DEEP.split("model.layers.1.attention.weight") == (2, "attention.weight")
    assert DEEP.split("model.layers.10.weight")[0] == 3
    assert DEEP.of_numbered("1.attention.weight") == "model.layers.0.attention.weight"
    assert DEEP.prefixes[4] == "head"
    for name in ("model.layers.2.weight", "model.weight", "head", "model.layers.1", "", ".", "."):
        assert name not in DEEP
        with pytest.raises(KeyError):
            DEEP.split(name)


def test_the_longest_prefix_owns_a_parameter() -> None:
    assert NESTED.split("block.weight") == (0, "weight")
    assert NESTED.split("block.1.weight") == (1, "weight")
    assert NESTED.split("block.1.a.weight") == (2, "weight")
    assert NESTED.split("block.10.weight") == (0, "10.weight")
    assert NESTED.split("b.weight") == (3, "weight")
    assert NESTED.parameter(0, "2.weight") == "block.2.weight"


RENAMED = LayerNames(
    (
        LayerNames.of_renamed("embed", {"wte": "model.wte", "wpe.weight": "model.places"}),
        LayerNames.of_renamed("model.h.0", {"attn": "model.h.0.self_attn", "attn.out": "out"}),
        "head",
    )
)


@pytest.mark.parametrize(
    ("index", "key", "name"),
    [
        (0, "wte.weight", "model.wte.weight"),
        (0, "wpe.weight", "model.places"),
        (0, "wpe.bias", "embed.wpe.bias"),
        (0, "wtes.weight", "embed.wtes.weight"),
        (1, "attn.q.weight", "model.h.0.self_attn.q.weight"),
        (1, "attn.out.weight", "out.weight"),
        (1, "mlp.weight", "model.h.0.mlp.weight"),
        (2, "weight", "head.weight"),
    ],
)
def test_names_in_a_layer_are_replaced(index: int, key: str, name: str) -> None:
    assert RENAMED.parameter(index, key) == name
    assert RENAMED.split(name) == (index, key)
    assert RENAMED.units == ("embed", "model.h.0", "head")
    again = LayerNames(RENAMED.prefixes)
    assert again.split(name) == (index, key)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([LayerNames.of_renamed(u, {"a": "c"}) for u in "01"], "several parts of layers with one"),
        ([LayerNames.of_renamed("0", {"a": "1"}), "1"], "a part of a layer with the name of a"),
        ([LayerNames.of_renamed("0", {"a": ""})], "a layer named"),
        ([LayerNames.of_renamed("0", {"a": "b.."})], "a layer named"),
    ],
)
def test_names_that_replace_others_are_checked(prefixes: list[str], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        LayerNames(tuple(prefixes))


def test_two_layers_cannot_have_parameters_of_one_name() -> None:
    with pytest.raises(UsageError) as caught:
        NESTED.parameter(0, "1.weight")
    assert str(caught.value) == (
        "layers 'block' and 'block.1': both have a parameter or buffer named 'block.1.weight'; "
        "give one of the layers another name"
    )


def test_names_are_grouped_by_layer() -> None:
    found = NESTED.by_layer(["block.w", "other.w", "block.1.w", "block.v", "block"])
    assert found == ({0: ["w", "v"], 1: ["w"]}, ["other.w", "block"])


@pytest.mark.parametrize(
    ("prefixes", "problem"),
    [
        (("a", "b", "a"), "several layers with one name"),
        (("",), "a layer named ''"),
        (("a..b",), "a layer named 'a..b'"),
        ((".a...",), "a layer named '.a...'"),
        (("a.",), "a layer named 'a.'"),
        (("a" * 513,), "a layer's name of 513 characters"),
    ],
)
def test_prefixes_that_no_module_has_are_refused(prefixes: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        LayerNames(prefixes)
    assert str(caught.value) == problem


@given(st.lists(PATHS, min_size=1, max_size=6, unique=True), st.data())
def test_a_name_splits_into_its_parts(prefixes: list[str], data: st.DataObject) -> None:
    names = LayerNames(tuple(prefixes))
    index = data.draw(st.integers(0, len(names) - 1))
    key = data.draw(PATHS)
    try:
        name = names.parameter(index, key)
    except UsageError:
        longer = [p for p in prefixes if f"{prefixes[index]}.{key}".startswith(f"{p}.")]
        assert max(longer, key=len) != prefixes[index]
    else:
        assert names.split(name) == (index, key)
        assert names.of_numbered(numbered(index, key)) == name


def test_the_names_of_a_cut_module() -> None:
    layers = [("words", []), ("blocks.0", ["places"]), ("head", ["places", "words.weight"])]
    names = LayerNames(tuple(LayerNames.of_cut(unit, others) for unit, others in layers))
    assert names.units == ("words", "blocks.0", "head")
    for index, name in enumerate(("words.weight", "blocks.0.mix.bias", "head.bias")):
        assert names.split(name) == (index, f"^.{name}")
        assert names.parameter(index, f"^.{name}") == name
    assert names.split("places") == (1, "^.places")
    assert names.of_numbered("2.^.words.weight") == "words.weight"
    assert shown("2.^.words.weight") == "words.weight"
    assert shown("2.words.weight") == "2.words.weight"
    assert "blocks.1.mix" not in names


def test_the_first_layer_owns_what_layers_of_a_cut_module_share() -> None:
    names = LayerNames((".cell..scale", ".head..cell.weight", ".cell@2..scale"))
    assert names.units == ("cell", "head", "cell@2")
    assert names.is_first(0, "^.cell.weight")
    assert names.is_first(0, "^.scale")
    assert names.is_first(1, "^.head.bias")
    assert not names.is_first(1, "^.cell.weight")
    assert not names.is_first(2, "^.cell.weight")
    assert not names.is_first(2, "^.scale")
    assert LayerNames.numbered(2).is_first(1, "weight")


def test_a_parameter_by_its_layers_index() -> None:
    assert split_numbered("3.attention.weight") == (3, "attention.weight")
    assert layer_of("12.weight") == 12
    assert is_numbered("11.weight", 12)
    assert not is_numbered("12.weight", 12)
    assert not is_numbered("weight", 12)
    for name in ("weight", "3", "3.", ".weight", "-1.weight", "a.weight", "٣.weight", ""):
        with pytest.raises(ValueError, match="is not a layer's index"):
            split_numbered(name)
