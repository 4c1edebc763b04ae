"""Fixtures of the coordinator's tests."""

from __future__ import annotations

import pytest

from pipeworker.trace.sampling import Sampling


@pytest.fixture(autouse=True)
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record no step by chance of time, so that messages are as the tests expect them."""
    monkeypatch.setattr(Sampling, "takes", lambda *_, **__: False)
