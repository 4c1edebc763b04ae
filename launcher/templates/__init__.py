"""Job files to begin with, as `pipeworker init` writes them: each runs as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

from pipeworker.errors import UsageError

EXAMPLES = {
    "mlp": "a small network for points in the plane",
    "cnn": "convolutions for images",
    "transformer": "a language model of bytes",
    "unet": "an image for an image, with skip connections",
}
"""What each is, by its name; all make or find their data on the spot."""

_NAME = "model.py"
"""What they call themselves."""


def write(path: Path, example: str) -> None:
    """Write one.

    Raises:
        UsageError: there is such a file already.
        OSError: it cannot be written.
    """
    text = Path(__file__).with_name(f"{example}.py").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace(_NAME, shlex.quote(path.name)))
    except FileExistsError:
        raise UsageError(f"{path} is there already: name another file") from None
