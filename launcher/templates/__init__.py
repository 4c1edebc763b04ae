"""Job files to begin with, as `pipeworker init` writes them: each runs as it is."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
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

_NEEDS = {"finetune": "transformers"}
"""By name, the package that a template imports and pipeworker does not need."""
_NAME = "model.py"
"""The name of the job file in a template's text."""


def write(path: Path, example: str) -> None:
    """Write an example to a new file."""
    if path.suffix != ".py":
        raise UsageError(f"{path}: not a job file; its name must end in .py")
    text = Path(__file__).with_name(f"{example}.py").read_text("utf-8")
    try:
        file = path.open("x", encoding="utf-8", errors="backslashreplace")
        try:
            with file:
                file.write(text.replace(_NAME, shlex.quote(path.name)))
        except BaseException:
            path.unlink()
            raise
    except FileExistsError:
        raise UsageError(f"{path}: exists already; name another file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name another file") from None


def missing_package(example: str) -> str:
    """Return the name of a package that an example needs and this host lacks; else ""."""
    package = _NEEDS.get(example, "")
    return package if package and find_spec(package) is None else ""
