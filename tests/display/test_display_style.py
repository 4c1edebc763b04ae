"""The user's choices for the display of a job."""

from __future__ import annotations

import pytest

from pipeworker.display.style import Style
from pipeworker.errors import UsageError


def test_quiet_hides_output_unless_it_is_requested() -> None:
    assert Style().shown_output == "stage"
    assert Style(quiet=True).shown_output == "none"
    assert Style(quiet=True, output="all").shown_output == "all"


def test_contradictions_and_wrong_values_are_rejected() -> None:
    with pytest.raises(UsageError, match="--quiet and --verbose: they exclude each other; choose"):
        Style(quiet=True, verbose=True)
    with pytest.raises(UsageError, match="--log-every 0: must be an integer of 1 or more"):
        Style(log_every=0)
    with pytest.raises(UsageError, match="--log-every '3': must be an integer of 1 or more"):
        Style(log_every="3")  # type: ignore[arg-type]
