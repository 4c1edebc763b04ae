"""The text of figures."""

from __future__ import annotations

import pytest

from pipeworker.plan.figures import bytes_text, count_text, rate_text, seconds_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (seconds_text(2.345), "2.35 s"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(0.123), "123 ms"),
        (seconds_text(0.0000042), "4.20 µs"),
        (rate_text(1234.5), "1234"),
        (rate_text(12.345), "12.3"),
        (count_text(12), "12"),
        (count_text(1_250_000), "1.2M"),
        (count_text(350_000), "350k"),
        (bytes_text(999), "999 B"),
        (bytes_text(14_200_000_000), "14.2 GB"),
        (bytes_text(250_000_000), "250 MB"),
    ],
)
def test_figures(text: str, shown: str) -> None:
    assert text == shown
