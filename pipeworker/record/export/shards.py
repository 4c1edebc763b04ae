"""How weights are dealt out to files, as Hugging Face does it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pipeworker.errors import UsageError

DEFAULT = "5GB"
"""Hugging Face's own."""
_UNITS = {
    **{f"{letter}B": 1000**power for power, letter in enumerate(("", "K", "M", "G", "T"))},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?I?B)", re.ASCII | re.IGNORECASE)


def size_of(text: str) -> int:
    """Bytes that ``500MB`` or ``5GiB`` says.

    Raises:
        UsageError: it says none.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if not size:
        raise UsageError(f"--shard-size {text}: must be a size, as 500MB or 5GB")
    return size


def split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Tensors by file, in order, each file with at most so many bytes, or with one tensor alone.

    Args:
        sizes: in bytes, by name.
    """
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > most:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def names(count: int) -> list[str]:
    """Of so many files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index(files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> dict[str, object]:
    """Which tensor is in which file, as tools that read this layout want to know.

    Args:
        files: by name, their tensors.
    """
    where = {name: file for file, held in files.items() for name in held}
    return {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
