"""The mark of tests that `make test` leaves out, as they take ten seconds of CPU each."""

import pytest

slow = pytest.mark.skipif(
    "not config.getoption('run_slow')", reason="takes ten seconds of CPU: --run-slow"
)
"""For jobs whose processes must all be cold interpreters; `make test-all` includes them."""
