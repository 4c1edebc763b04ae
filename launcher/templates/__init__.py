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
    "finetune": "a language model of transformers, trained further",
}
"""Descriptions by name; each template creates its data itself."""

_NAME = "model.py"
"""The name of the job file in a template's text."""


def write(path: Path, example: str) -> None:
    """Write an example to a new file."""
    text = Path(__file__).with_name(f"{example}.py").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text.replace(_NAME, shlex.quote(path.name)))
    except FileExistsError:
        raise UsageError(f"{path}: exists already; name another file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name another file") from None
