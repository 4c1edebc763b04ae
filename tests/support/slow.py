"""The mark of tests that `make test` leaves out; the nightly run includes them."""

from collections.abc import Iterable
from typing import Any

import pytest

slow = pytest.mark.skipif("not config.getoption('run_slow')", reason="takes long: --run-slow")
"""For tests of seconds of CPU: jobs of cold interpreters, drawn faults, a measured duration.

Also for the further cases of a test whose parts other tests cover: a second engine or schedule.
"""


def mostly_slow(values: Iterable[Any], every: int) -> list[Any]:
    """Return the values of a test's parameter; all but each `every`-th are marked as slow."""
    return [
        pytest.param(value, marks=slow if index % every else ())
        for index, value in enumerate(values)
    ]
