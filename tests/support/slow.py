"""The mark of tests that `make test` leaves out; the nightly run includes them."""

import pytest

slow = pytest.mark.skipif("not config.getoption('run_slow')", reason="takes long: --run-slow")
"""For tests of seconds of CPU: jobs of cold interpreters, drawn faults, a measured duration.

Also for the further cases of a test whose parts other tests cover: a second engine or schedule.
"""
