"""Which layers each stage owns.

A *balance* is the number of layers of each stage in order, as in torchgpipe: ``(3, 5, 5, 3)``.
"""

from __future__ import annotations

from pipeworker.errors import UsageError


def even(layers: int, stages: int) -> tuple[int, ...]:
    """The balance whose stages differ by at most one layer, the larger ones first.

    The last stage also computes the loss, so it is never given the extra layer.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    if layers < stages:
        raise UsageError(
            f"{stages} stages need at least {stages} layers, but model() has {layers}: "
            f"use --stages {layers} or fewer, or split the layers more finely"
        )
    share, extra = divmod(layers, stages)
    return tuple(share + (stage < extra) for stage in range(stages))


def parse_balance(text: str) -> tuple[int, ...]:
    """Read ``"3,5,5,3"``.

    Raises:
        UsageError: an entry is not a whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(_not_a_list(repr(text))) from None


def check_entries(balance: tuple[int, ...], stages: int) -> None:
    """Raise UsageError unless `balance` has an entry for each stage, and a layer in each entry."""
    shown = ",".join(map(str, balance))
    if not balance or min(balance) < 1:
        raise UsageError(_not_a_list(repr(shown)))
    if len(balance) != stages:
        raise UsageError(f"--balance {shown} is for {len(balance)} stages, but there are {stages}")


def _not_a_list(shown: str) -> str:
    return (
        f"--balance {shown} is not a list of layer counts: write one positive number for each "
        "stage, as in 3,5,5,3"
    )


def check_balance(balance: tuple[int, ...], layers: int, stages: int) -> tuple[int, ...]:
    """Return `balance` if it gives every layer to exactly one of the stages.

    Raises:
        UsageError: it has another number of stages, or its sum is not the number of layers.
    """
    check_entries(balance, stages)
    if sum(balance) != layers:
        shown = ",".join(map(str, balance))
        raise UsageError(
            f"--balance {shown} adds up to {sum(balance)} layers, but model() has {layers}"
        )
    return balance


def ranges(balance: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The half-open range of layer indices of each stage."""
    stops = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return tuple((stop - size, stop) for stop, size in zip(stops, balance, strict=True))
