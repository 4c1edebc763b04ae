"""The graces, limits and intervals of a job, and what holds between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker import environment
from pipeworker.errors import UsageError
from pipeworker.timings import DEFAULT, VARIABLE, Timings

NAMES = [field.name for field in dataclasses.fields(Timings)]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    """The environment is looked at once a process."""
    environment.timings.cache_clear()
    yield
    environment.timings.cache_clear()


def test_the_defaults_are_a_set() -> None:
    assert Timings() == DEFAULT
    assert all(value > 0 for value in dataclasses.astuple(DEFAULT))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("heartbeat", 0.7, "three heartbeats may be late"),
        ("silent", 3 * DEFAULT.heartbeat, "three heartbeats may be late"),
        ("burst", DEFAULT.tick, "a flood may delay a tick, not swallow one"),
        ("tick", DEFAULT.burst, "a flood may delay a tick, not swallow one"),
        ("ping", DEFAULT.echo / 2, "a closed connection is found by pings"),
        ("silent", DEFAULT.echo, "an echo knows who is silent when it ends"),
        ("tick", DEFAULT.echo - DEFAULT.silent, "an echo knows who is silent when it ends"),
        ("connect", 4 * DEFAULT.handshake, "strangers leave time for the peer"),
        ("handshake", DEFAULT.connect / 4, "strangers leave time for the peer"),
        ("reconnect", DEFAULT.echo / 2, "a connection may come back"),
        ("echo", DEFAULT.coordinator, "the coordinator speaks before it is given up"),
        ("coordinator", DEFAULT.echo, "the coordinator speaks before it is given up"),
        ("leave", DEFAULT.linger, "the last words leave before the process"),
        ("linger", DEFAULT.leave, "the last words leave before the process"),
        ("verdict", DEFAULT.interrupt + DEFAULT.linger, "rank 0 hears the verdict"),
        ("verdict", DEFAULT.echo + DEFAULT.linger, "rank 0 hears the"),
        ("yields", DEFAULT.leave, "who lets another end first leaves in time"),
        ("reach", DEFAULT.meet, "who does not reach the coordinator says so where ranks meet"),
        ("stuck", DEFAULT.look, "who is stuck is looked at"),
        ("look", DEFAULT.stuck, "who is stuck is looked at"),
        ("meet", DEFAULT.verdict, "ranks that meet outlast an old job"),
        ("grow", DEFAULT.tick, "a job with fewer stages runs before it tries with more"),
    ],
)
def test_a_change_that_contradicts_the_others_is_refused(name: str, value: float, why: str) -> None:
    """Equal is not enough: each of them is a race."""
    with pytest.raises(ValueError, match=f"timings contradict each other: {why}"):
        dataclasses.replace(DEFAULT, **{name: value})


def test_two_changes_that_go_together_are_no_contradiction() -> None:
    slower = dataclasses.replace(DEFAULT, heartbeat=1.0, silent=4.0, echo=5.0, coordinator=6.0)
    assert slower.silent == 4.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"coordinator": 1.9, "echo": 1.8}, "an echo knows|a closed connection"),
        ({"ping": 0.1, "silent": 1.6, "echo": 2.0}, "a connection may come back"),
        (
            {"reconnect": 2.0, "echo": 4.5, "coordinator": 4.0, "verdict": 20.0},
            "the coordinator may come back|the coordinator speaks",
        ),
        ({"interrupt": 0.5, "linger": 2.0, "verdict": 4.5}, "rank 0 hears the cause"),
    ],
)
def test_what_others_would_hide_is_refused_too(changes: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(DEFAULT, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_one_is_bound_to_another(name: str) -> None:
    """One that could be anything would belong where it is used."""
    value = getattr(DEFAULT, name)
    refused = 0
    for factor in (1e-6, 1e6):
        try:
            dataclasses.replace(DEFAULT, **{name: factor * value})
        except ValueError:
            refused += 1
    assert refused


@given(st.floats(0.001, 1000))
def test_a_scaled_set_is_a_set(factor: float) -> None:
    scaled = DEFAULT.scaled(factor)
    for name in NAMES:
        assert getattr(scaled, name) == factor * getattr(DEFAULT, name)
    assert scaled.scaled(1) == scaled


@pytest.mark.parametrize("text", [None, ""])
def test_nothing_said_is_the_default(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert environment.timings() == DEFAULT


@pytest.mark.parametrize(("text", "factor"), [("1", 1), ("0.25", 0.25), ("3", 3), (" 1e-1 ", 0.1)])
def test_the_environment_scales(monkeypatch: pytest.MonkeyPatch, text: str, factor: float) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert environment.timings() == DEFAULT.changed(text) == DEFAULT.scaled(factor)


def test_the_environment_sets_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "stuck=0.2,verdict=20")
    assert environment.timings() == dataclasses.replace(DEFAULT, stuck=0.2, verdict=20.0)


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 1000), min_size=1))
def test_what_is_set_is_a_set_or_refused(values: dict[str, float]) -> None:
    text = ",".join(f"{name}={value!r}" for name, value in values.items())
    try:
        expected = dataclasses.replace(DEFAULT, **values)
    except ValueError:
        with pytest.raises(ValueError, match="timings contradict each other"):
            DEFAULT.changed(text)
    else:
        assert DEFAULT.changed(text) == expected


def test_the_environment_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    assert environment.timings().ping == 2 * DEFAULT.ping
    monkeypatch.setenv(VARIABLE, "3")
    assert environment.timings().ping == 2 * DEFAULT.ping


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "a time must be greater than 0") for text in ("0", "-1", "nan", "-inf")),
        *((text, ".") for text in ("fast", "1,5", "1s", "0x2", " ", "stuck", "1,stuck=0.2")),
        *((text, ".") for text in ("stuck=", "stuck=1s", "stuck=0.2,", "stuck=1=2", "stuck=0.2 1")),
        *((text, "a time must be greater than 0") for text in ("stuck=0", "meet=-1", "meet=nan")),
        ("shy=1", "there is no timing shy"),
        ("stuck=0.2,Meet=1,shy=2", "there is no timing Meet, shy"),
        ("=1", "there is no timing"),
        ("stuck=0.05", "timings contradict each other: who is stuck is looked at"),
        *((text, "timings contradict each other") for text in ("inf", "1e308", "1e-323")),
    ],
)
def test_nonsense_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=why) as caught:
        environment.timings()
    assert str(caught.value).startswith(f"{VARIABLE} is {text!r}: ")
