"""The text of figures: times, rates, counts and sizes."""

from __future__ import annotations

from collections.abc import Sequence


def seconds_text(seconds: float) -> str:
    """Format a time as ``1.2 s``, ``34 ms`` or ``5.6 µs``, with two or three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "µs":
            break
    digits = 0 if value >= 100 or not value else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def rate_text(rate: float) -> str:
    """Format a number of samples a second."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def scaled(
    value: float, units: Sequence[str], *, base: int = 1000, least: float = 1000
) -> tuple[float, str]:
    """Return a number in the first of `units` in which it is less than `least`, or in the last."""
    for unit in units[:-1]:
        if value < least:
            return value, unit
        value /= base
    return value, units[-1]


def plural(count: int, noun: str) -> str:
    """Return a number of things with their noun: ``1 stage``, ``2 micro-batches``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def count_text(count: int) -> str:
    """Format a number of parameters as ``12``, ``3.4k``, ``56M`` or ``1.2G``."""
    value, unit = scaled(count, ("", "k", "M", "G", "T"))
    return f"{value:.1f}{unit}" if unit and value < 10 else f"{value:.0f}{unit}"


def bytes_text(size: int) -> str:
    """Format a size in bytes as ``12 B``, ``56 MB`` or ``1.2 GB``, by powers of 1000."""
    value, unit = scaled(size, ("B", "kB", "MB", "GB", "TB"))
    return f"{value:.1f} {unit}" if unit != "B" and value < 100 else f"{value:.0f} {unit}"


def flops_text(rate: float) -> str:
    """Format floating-point operations a second as ``4.6 GFLOP/s``, with three digits."""
    value, unit = scaled(rate, ("", "k", "M", "G", "T", "P"), least=999.5)
    return f"{value:.3g} {unit}FLOP/s"
