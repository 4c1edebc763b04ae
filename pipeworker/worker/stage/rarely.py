"""Checks that cost nothing in the long run: of many equal events the first, then ever fewer."""

from __future__ import annotations


def is_checked(number: int, first: int = 1) -> bool:
    """Return whether the event of a number, counted from 1, is checked.

    The `first` ones are, because nearly every mistake shows there, and of the others those whose
    number is a power of two, because a mistake may begin late.
    """
    return number <= first or number & (number - 1) == 0
