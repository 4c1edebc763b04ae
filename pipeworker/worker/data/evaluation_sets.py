"""The data of an evaluation pass: one source, or several by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from pipeworker.errors import UsageError, a_type
from pipeworker.job.signatures import with_start
from pipeworker.worker.data.reader import MicroBatches, Reader

_SOURCE = "evaluation(): gave"


def read_sets(
    evaluation: Any, reader: Callable[..., Reader]
) -> Generator[MicroBatches, None, None]:
    """Yield the mini-batches of ``evaluation()``, each with the name of its set.

    The sets are the values of a dict, in its order. Each is read under the random stream of a
    single one. Afterwards the user's own generators have the states from before the pass, also if
    the iterator is closed before its end.

    Args:
        evaluation: a source of mini-batches, a dict of sources, or a function that returns either.
        reader: makes the reader of a source; its other argument is `error_prefix`.
    """
    reader = functools.partial(reader, apart=True)  # data() may have the same loader
    if isinstance(evaluation, Mapping):
        yield from _read(_checked(evaluation), reader)
    elif callable(evaluation):
        yield from _call(evaluation, reader)
    else:
        yield from _read_one("", reader(evaluation, error_prefix=_SOURCE))


def _call(function: Callable[[], Any], reader: Callable[..., Reader]) -> Iterator[MicroBatches]:
    """Read what a function returns; the first reader calls it, under its random stream."""
    sets: dict[str, Any] = {}

    def first_source() -> Any:
        found = _from_start(function)
        if not isinstance(found, Mapping):
            return found
        sets.update(_checked(found))
        name, source = next(iter(sets.items()))
        first.error_prefix = _prefix(name)
        return _from_start(source) if callable(source) else source

    functools.update_wrapper(first_source, function)
    del first_source.__wrapped__  # type: ignore[attr-defined]  # it takes no `start`
    # The reader looks there for the generators of the user's.
    vars(first_source)["__self__"] = getattr(function, "__self__", function)
    first = reader(first_source, error_prefix=_SOURCE)
    try:
        for batches in iter(first.read, None):
            yield replace(batches, name=next(iter(sets), ""), length=first.length)
        yield from _read({name: sets[name] for name in [*sets][1:]}, reader)
    finally:
        first.rewind()


def _from_start(function: Callable[..., Any]) -> Any:
    """Call a function that may take the number of mini-batches to skip: a pass skips none."""
    taking = with_start(function)
    return function() if taking is None else taking(0)


def _read(sets: Mapping[str, Any], reader: Callable[..., Reader]) -> Iterator[MicroBatches]:
    for name, source in sets.items():
        yield from _read_one(name, reader(source, error_prefix=_prefix(name)))


def _read_one(name: str, reader: Reader) -> Iterator[MicroBatches]:
    with closing(reader.iterate_epoch()) as epoch:
        for batches in epoch:
            yield replace(batches, name=name, length=reader.length)


def _prefix(name: str) -> str:
    return f"evaluation()[{name!r}]: gave"


def _checked(found: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the sets of a dict, which are at least one, by their names."""
    if not found:
        raise UsageError("evaluation(): gave an empty dict; put at least one set into it, by name")
    for name in found:
        if not isinstance(name, str) or not name:
            shown = a_type(name) if not isinstance(name, str) else "an empty text"
            raise UsageError(
                f"evaluation(): gave a dict with {shown} as a name; name each set, as 'val'"
            )
    return found
