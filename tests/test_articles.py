"""Names of types in messages."""

from __future__ import annotations

import pytest

from pipeworker.errors import with_article


@pytest.mark.parametrize(
    "expected",
    [
        *("an int", "a list", "a uint8", "an OrderedDict", "a Linear", "an app.Batch", "a _Empty"),
        *("an SGD", "an LBFGS", "an RMSprop", "an AdamW", "a SparseAdam", "a GRU", "a UNet"),
        *("a LAMB", "a LARS", "an RAdam", "an ASGD", "an LSTM", "an MLP", "an MAELoss"),
    ],
)
def test_a_name_has_the_article_that_is_spoken(expected: str) -> None:
    assert with_article(expected.partition(" ")[2]) == expected
