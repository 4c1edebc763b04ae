"""The timings of a job and the inequalities between them."""

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
def _uncached() -> Iterator[None]:
    """Clear the cache: a process reads the environment once."""
    environment.timings.cache_clear()
    yield
    environment.timings.cache_clear()


def test_the_defaults_are_consistent() -> None:
    assert Timings() == DEFAULT
    assert all(value > 0 for value in dataclasses.astuple(DEFAULT))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("heartbeat", 0.7, "three heartbeats may be late"),
        ("silence", 3 * DEFAULT.heartbeat, "three heartbeats may be late"),
        ("burst", DEFAULT.tick, "a flood of messages may delay a tick but not skip it"),
        ("tick", DEFAULT.burst, "a flood of messages may delay a tick but not skip it"),
        ("ping", DEFAULT.grace / 2, "pings find a closed connection"),
        ("silence", DEFAULT.grace, "the grace period covers a silence"),
        (
            "tick",
            DEFAULT.grace - DEFAULT.silence,
            "the grace period covers a silence",
        ),
        ("connect", 4 * DEFAULT.handshake, "pending connections leave time for the peer"),
        ("handshake", DEFAULT.connect / 4, "pending connections leave time for the peer"),
        ("reconnect", DEFAULT.grace / 2, "a connection may be reopened"),
        ("grace", DEFAULT.coordinator, "the coordinator reports before workers abort"),
        ("coordinator", DEFAULT.grace, "the coordinator reports before workers abort"),
        ("exit", DEFAULT.linger, "the last messages are delivered before the process exits"),
        ("linger", DEFAULT.exit, "the last messages are delivered before the process exits"),
        ("verdict", DEFAULT.interrupt + DEFAULT.linger, "rank 0 receives the verdict"),
        ("verdict", DEFAULT.grace + DEFAULT.linger, "rank 0 receives the"),
        ("exit_delay", DEFAULT.exit, "a rank that delays its exit still exits in time"),
        (
            "reach",
            DEFAULT.rendezvous,
            "an unreachable coordinator is reported in time",
        ),
        ("stuck", DEFAULT.poll, "a stuck rank is polled"),
        ("poll", DEFAULT.stuck, "a stuck rank is polled"),
        ("rendezvous", DEFAULT.verdict, "the rendezvous outlasts the end of an earlier job"),
        ("grow", DEFAULT.tick, "a job with fewer workers runs before it tries more"),
    ],
)
def test_an_inconsistent_change_is_rejected(name: str, value: float, why: str) -> None:
    """Equality is not sufficient: each inequality decides a race."""
    with pytest.raises(ValueError, match=f"the timings contradict each other: {why}"):
        dataclasses.replace(DEFAULT, **{name: value})


def test_several_consistent_changes_are_accepted() -> None:
    slower = dataclasses.replace(DEFAULT, heartbeat=1.0, silence=4.0, grace=5.0, coordinator=6.0)
    assert slower.silence == 4.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"coordinator": 1.9, "grace": 1.8}, "the silent rank|pings find"),
        ({"ping": 0.1, "silence": 1.6, "grace": 2.0}, "a connection may be reopened"),
        (
            {"reconnect": 2.0, "grace": 4.5, "coordinator": 4.0, "verdict": 20.0},
            "the coordinator reports",
        ),
        ({"interrupt": 0.5, "linger": 2.0, "verdict": 4.5}, "rank 0 receives the cause"),
    ],
)
def test_each_inequality_is_checked_on_its_own(changes: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(DEFAULT, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_timing_is_constrained_by_another(name: str) -> None:
    """An unconstrained one would belong in the module that uses it."""
    value = getattr(DEFAULT, name)
    rejected = 0
    for factor in (1e-6, 1e6):
        try:
            dataclasses.replace(DEFAULT, **{name: factor * value})
        except ValueError:
            rejected += 1
    assert rejected


@given(st.floats(0.001, 1000))
def test_a_scaled_set_is_consistent(factor: float) -> None:
    scaled = DEFAULT.scaled(factor)
    for name in NAMES:
        assert getattr(scaled, name) == factor * getattr(DEFAULT, name)
    assert scaled.scaled(1) == scaled


@pytest.mark.parametrize("text", [None, ""])
def test_without_a_value_the_default_applies(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert environment.timings() == DEFAULT


@pytest.mark.parametrize(("text", "factor"), [("1", 1), ("0.25", 0.25), ("3", 3), (" 1e-1 ", 0.1)])
def test_the_environment_scales_all_timings(
    monkeypatch: pytest.MonkeyPatch, text: str, factor: float
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert environment.timings() == DEFAULT.changed(text) == DEFAULT.scaled(factor)


def test_the_environment_sets_some_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "stuck=0.2,verdict=20")
    assert environment.timings() == dataclasses.replace(DEFAULT, stuck=0.2, verdict=20.0)


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 1000), min_size=1))
def test_set_values_are_consistent_or_rejected(values: dict[str, float]) -> None:
    text = ",".join(f"{name}={value!r}" for name, value in values.items())
    try:
        expected = dataclasses.replace(DEFAULT, **values)
    except ValueError:
        with pytest.raises(ValueError, match="the timings contradict each other"):
            DEFAULT.changed(text)
    else:
        assert DEFAULT.changed(text) == expected


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    assert environment.timings().ping == 2 * DEFAULT.ping
    monkeypatch.setenv(VARIABLE, "3")
    assert environment.timings().ping == 2 * DEFAULT.ping


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "a duration must be greater than 0") for text in ("0", "-1", "nan", "-inf")),
        *((text, ".") for text in ("fast", "1,5", "1s", "0x2", " ", "stuck", "1,stuck=0.2")),
        *((text, ".") for text in ("stuck=", "stuck=1s", "stuck=0.2,", "stuck=1=2", "stuck=0.2 1")),
        *(
            (text, "a duration must be greater than 0")
            for text in ("stuck=0", "rendezvous=-1", "rendezvous=nan")
        ),
        ("shy=1", "unknown timing shy"),
        ("stuck=0.2,Reach=1,shy=2", "unknown timing Reach, shy"),
        ("=1", "unknown timing"),
        ("stuck=0.05", "the timings contradict each other: a stuck rank is polled"),
        *((text, "the timings contradict each other") for text in ("inf", "1e308", "1e-323")),
    ],
)
def test_an_invalid_environment_variable_is_rejected(
    monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=why) as caught:
        environment.timings()
    assert str(caught.value).startswith(f"{VARIABLE} {text!r}: ")
