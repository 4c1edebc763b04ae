"""One pass over the user's data, and the reading position in it.

A position is plain data with these entries:

- ``epoch``: number of the epoch.
- ``read``: number of mini-batches read in that epoch.
- ``began``: states of the user's own generators when the epoch began, if there are any.

These say how random numbers continue, if the mini-batches before the position can be skipped:

- ``random``: states of the random stream.
- ``drawn``: states of the user's own generators.
- ``processes``: states of the streams of a loader's processes, if it has some and they are needed.
- ``reset``: whether these processes persist from an epoch before.
- ``previous``: ``random`` and ``drawn`` one mini-batch earlier, for ``data(start)``.

A stateful source, with ``state_dict`` and ``load_state_dict``, has ``random``, ``drawn`` and:

- ``source``: its state.
- ``over``: whether it is exhausted.

Mini-batches of any other source are read again and dropped.
"""

from __future__ import annotations

import copy
import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from pipeworker.errors import UsageError, a_type
from pipeworker.job.signatures import with_start
from pipeworker.plan.figures import plural
from pipeworker.worker.blame import user_code
from pipeworker.worker.data.generators import (
    INVALID_POSITION,
    Generators,
    equal_states,
    generator_states,
    generators_of_source,
    of_sampler,
    own_generators,
    restore_states,
    restore_stream,
)
from pipeworker.worker.data.loader import (
    AdvancedLoader,
    end_processes,
    is_map_style,
    set_aside,
)
from pipeworker.worker.data.reread import Reread
from pipeworker.worker.stage import rng

END = object()
"""The marker after the last mini-batch."""

_MOST = 2**63 - 1
_STATES = {"drawn", "random"}
_WITH_STATE = {"source", "over", *_STATES}
_ENTRIES: dict[str, Any] = {
    "began": dict,
    "source": object,
    "over": bool,
    "drawn": dict,
    "random": tuple,
    "processes": torch.Tensor,
    "reset": bool,
    "previous": dict,
}


def validate_position(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a position from an untrusted source after checking its entries."""

    def reject(why: str) -> NoReturn:
        raise UsageError(INVALID_POSITION.format(why))

    if not isinstance(position, Mapping):
        reject(f"it is {a_type(position)}")
    for name in ("epoch", "read"):
        number = position.get(name)
        if type(number) is not int or not 0 <= number <= _MOST:
            reject(f"{name} is {reprlib.repr(number)}")
    for name, value in position.items():
        if name not in ("epoch", "read") and not isinstance(value, _ENTRIES.get(name, ())):
            reject(f"{reprlib.repr(name)} is {reprlib.repr(value)}")
    needed = _STATES if {"source", "over"}.isdisjoint(position) else _WITH_STATE
    if len(needed & position.keys()) not in (0, len(needed)):
        reject(f"it has not all of {', '.join(sorted(needed))}")
    previous = position.get("previous")
    if previous is not None and not previous.keys() >= _STATES:
        reject(f"'previous' has not all of {', '.join(sorted(_STATES))}")
    return position


class Way(Enum):
    """A way to reach a position in data; the next one is tried where one does not fit the data."""

    SKIP = auto()
    """Draw what precedes the first mini-batch as it was drawn at the beginning of the epoch."""
    CONTINUE = auto()
    """``data(start)`` alone: all that its iteration draws continues what was drawn before."""
    READ = auto()
    """All mini-batches of the epoch are read again."""


class Epoch:
    """A pass over data; it is created and used while the random stream of the data is active.

    It begins at a position in this epoch, unless that is empty. The caller has restarted the random
    stream. With `apart` another epoch may be in the middle of the same loader, whose processes
    persist: :meth:`rewind` returns them to that epoch.

    Attributes:
        count: number of mini-batches read or skipped.
        reached: whether `way` leads to the position.
        lacks_generators: whether there was a generator at the begin of this epoch that is not found
            before it: a dataset may make it for its first item.
        stateful: whether the source has ``state_dict`` and ``load_state_dict``.
        one_shot: whether the data is an iterator, which cannot be started again.
    """

    def __init__(
        self,
        data: Any,
        name: str,
        number: int,
        stream: rng.Stream,
        position: Mapping[str, Any],
        way: Way,
        *,
        apart: bool = False,
    ) -> None:
        self.number = number
        self.count = 0
        self.reached = True
        self.one_shot = False
        self._data = data
        self._name = name
        self._stream = stream
        self._ended = self._is_searched = False
        self._state_before_read: dict[str, Any] = {}  # of a stateful source
        self._recent: deque[dict[str, Any]] = deque(maxlen=3)
        """States after the last mini-batches, if some of the epoch can be skipped."""
        self._loader: AdvancedLoader | None = None
        self._iterator: Iterator[Any] | None = None
        """None until the first mini-batch is needed: processes of a loader start with it."""
        start = with_start(data) if callable(data) else None
        continues = way is Way.CONTINUE and start is not None
        skips = "random" in position and (way is Way.SKIP or continues)
        # One mini-batch of data(start) is read again, to see whether it draws what it drew before.
        first = max(0, position["read"] - 1) if skips and "previous" in position and start else 0
        began = position.get("began", {})
        with user_code(f"{name}()"):
            found = own_generators(data)
            restore_states(found, began)
            self._began = generator_states(found)
            source = self._source = _source(data, start, first)
            self.stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
            loader = isinstance(source, DataLoader)
            if loader or not self.stateful:  # other stateful sources save their own generators
                more = generators_of_source(source)
                restore_states(more, began)
                self._began |= generator_states(more)
                found |= more
            self._all_generators = found
            processes = getattr(source, "num_workers", 0)  # those that persist have generators too
            self.lacks_generators = not processes and not began.keys() <= found.keys()
            # Without a reference to this object: a cycle would keep the loader's processes alive.
            self._states = partial(_states, found, stream)
            self._continue_from = partial(_restore, found, stream)
            self._loader_generators = found if loader else {}
            if "source" in position:
                self._load(position["source"])
            elif first and continues:
                self._continue_from(position["previous"])
            by_number = is_map_style(source) or not hasattr(source, "__iter__")
            self._by_number = by_number and not self.stateful and start is None
            self._takes_start = start is not None and not self.stateful
        self._give_back = set_aside(source) if apart else partial(end_processes, source)
        if not self.stateful and (position or not self._by_number):
            # Those of a global loader: a peek has started them, or their streams are not recorded.
            end_processes(source)
        if position:
            self._begin(position if skips else {})
        if "source" in position:
            restore_states(self._loader_generators, position["drawn"])
            restore_stream(stream, position["random"])
            self.count = position["read"]
            # A source in its final state may yield nothing, or begin its next epoch.
            self._ended = position["over"]
        elif first:
            self._repeat_last(position)
        elif skips and self._by_number:
            self._skip_to(position)
        elif position:
            self.skip(position["read"] - self.count)

    def _load(self, state: Any) -> None:
        if not self.stateful:
            raise UsageError(
                f"{self._name}(): gave {a_type(self._source)}, which has no load_state_dict, but "
                "the data of the checkpoint had one; resume with the same data"
            )
        self._source.load_state_dict(copy.deepcopy(state))

    def _begin(self, position: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the iteration, at a position if the source can begin there."""
        with user_code(f"{self._name}()"):
            iterator = self._iterator = self._iterate(self._source, position)
        self.one_shot = iterator is self._data
        if self._by_number or self._takes_start:
            self._recent.append(self._states())
        return iterator

    def _iterate(self, source: Any, position: Mapping[str, Any]) -> Iterator[Any]:
        read = position.get("read", 0) if self._by_number else 0
        if self._by_number and isinstance(source, DataLoader):
            self._loader = AdvancedLoader(source, position, self._states, self._continue_from)
            self.count = self._loader.skipped
            return self._loader.iterator
        if _is_one_batch(source):
            raise UsageError(
                f"{self._name}(): gave {a_type(source)} that has a tensor in it, as one "
                "mini-batch; return an iterable of mini-batches, as a DataLoader or "
                "[(input, target)]"
            )
        if hasattr(source, "__iter__"):
            return iter(source)
        if hasattr(source, "__getitem__"):
            self.count = min(read, len(source))
            return (source[index] for index in range(self.count, len(source)))
        raise UsageError(
            f"{self._name}(): gave {a_type(source)}; return an iterable of (input, target) "
            "mini-batches"
        )

    def _skip_to(self, position: Mapping[str, Any]) -> None:
        """Continue at a position; the source has been advanced where it can be."""
        if self._loader is not None and not (
            self._loader.complete and _is_unambiguous(self._loader.reached, position)
        ):
            self.reached = False
            return
        self.skip(position["read"] - self.count)
        self._continue_from(position)
        self._recent = deque([_states_of(position)], maxlen=3)

    def _repeat_last(self, position: Mapping[str, Any]) -> None:
        """Read the mini-batch before a position again; see whether the same numbers are drawn.

        The processes of a loader draw numbers that are not seen here.
        """
        self.count = position["read"] - 1
        self._recent = deque([_states_of(position["previous"])], maxlen=3)
        same = self.next_batch() is not END and equal_states(self._states(), _states_of(position))
        self.reached = same and not getattr(self._source, "num_workers", 0)

    @property
    def length(self) -> int:
        """The length of the source in mini-batches; 0 if it has none."""
        try:
            return len(self._source)
        except Exception:  # of the user's __len__; a value that is only displayed fails no job
            return 0

    @property
    def is_read_again(self) -> bool:
        """Whether the mini-batches before a position can only be read again."""
        return not (self.stateful or self._by_number or self._takes_start)

    @property
    def generator_names(self) -> Set[str]:
        """The names of the user's own generators that were found."""
        return self._all_generators.keys()

    def next_batch(self) -> Any:
        """Return the next mini-batch, or END."""
        if self._ended:
            return END
        iterator = self._begin({}) if self._iterator is None else self._iterator
        if self.stateful:
            self._state_before_read = self._source_state()
        with user_code(f"{self._name}()"):
            item = next(iterator, END)
        self._ended = item is END
        if self._ended and self._loader is not None:
            self._loader.end(self.count)
        self.count += not self._ended
        if not self._is_searched:
            self._is_searched = True
            self._reject_sample(item)
            self._search_again()
        if self.stateful and not self._ended:
            self._state_before_read["over"] = False  # whatever length it says it has
        if not self._ended and (self._by_number or self._takes_start):
            self._recent.append(self._states())
        return item

    def _reject_sample(self, item: Any) -> None:
        """Reject an item of a dataset that has a number for a target, as samples have."""
        is_pair = isinstance(item, (tuple, list)) and len(item) == 2
        if isinstance(self._source, Dataset) and is_pair and isinstance(item[1], (int, float)):
            raise UsageError(
                f"{self._name}(): gave {a_type(self._source)} of samples, whose targets are "
                "numbers; return DataLoader(samples, batch_size=...)"
            )

    def _search_again(self) -> None:
        """Have mini-batches read again on resume if the first one has made a generator.

        Without the generator at the begin of an epoch nothing could be given its state. The items
        of a loader with processes make theirs in these. A sampler that makes one does so again
        when it is skipped.
        """
        in_processes = getattr(self._source, "num_workers", 0)
        if (self._by_number or self._takes_start) and not in_processes:
            known = set(map(id, self._all_generators.values()))
            now = own_generators(self._data) | generators_of_source(self._source)
            if any(id(found) not in known and not of_sampler(name) for name, found in now.items()):
                self._by_number = self._takes_start = False

    def skip(self, count: int) -> None:
        """Read `count` mini-batches and drop them; report the progress if that takes long."""
        progress = Reread(f"{self._name}()", count)
        for number in range(count):
            if self.next_batch() is END:
                raise UsageError(
                    f"{self._name}(): gave {plural(self.count, 'mini-batch')} in epoch "
                    f"{self.number}, fewer than were read before the checkpoint; resume with the "
                    "same data"
                )
            progress.show(number + 1)

    def rewind(self) -> None:
        """Restore the user's own generators to their states at the beginning of the epoch.

        Processes of a loader that persist have states of their own, and end; with `apart` only
        those of this epoch.
        """
        self._give_back()
        self._give_back = _nothing
        restore_states(self._all_generators, self._began)

    def position(self, before_last: bool) -> dict[str, Any]:
        """Return the reading position; with `before_last`, that before the last mini-batch read."""
        position: dict[str, Any] = {"epoch": self.number, "read": self.count - before_last}
        if self._began:
            position["began"] = self._began
        if self.stateful:
            position |= self._state_before_read if before_last else self._source_state()
        elif (position["read"] and (self._by_number or self._takes_start)) or (
            self._loader is not None and self._loader.persists
        ):
            position |= self._states_at(position["read"], before_last)
        return position

    def _states_at(self, read: int, before_last: bool) -> dict[str, Any]:
        """Return the entries by which a position can be skipped to; none if that is impossible."""
        *_, previous, states = (None, *self._recent)[: len(self._recent) + 1 - before_last]
        if states is None or (self._takes_start and previous is None):
            return {}
        if self._takes_start:
            return {**states, "previous": previous}
        processes = self._loader.recorded(read) if self._loader is not None else {}
        return {} if processes is None else states | processes

    def _source_state(self) -> dict[str, Any]:
        """Return the entries of a position that a stateful source needs to resume here."""
        source, own, over = self._source, self._loader_generators, self._ended
        with user_code(f"{self._name}()"):
            state = copy.deepcopy(source.state_dict())
            if hasattr(source, "__len__") and not isinstance(source, DataLoader):
                over = over or len(source) == self.count
            sampler = getattr(source, "sampler", None)
        if isinstance(sampler, RandomSampler) and not over:  # draws again on resume
            own = {name: drawn for name, drawn in own.items() if drawn is not sampler.generator}
        drawn = generator_states(own)
        return {"source": state, "over": over, "drawn": drawn, "random": self._stream.states()}


def _source(data: Any, start: Callable[[int], Any] | None, first: int) -> Any:
    if start is not None:
        return start(first)
    return data() if callable(data) else data


def _states(generators: Generators, stream: rng.Stream) -> dict[str, Any]:
    return {"drawn": generator_states(generators), "random": stream.states()}


def _restore(generators: Generators, stream: rng.Stream, states: Mapping[str, Any]) -> None:
    restore_states(generators, states["drawn"])
    restore_stream(stream, states["random"])


def _states_of(position: Mapping[str, Any]) -> dict[str, Any]:
    return {name: position[name] for name in sorted(_STATES)}


def _nothing() -> None:
    """Do nothing."""


def _is_one_batch(source: Any) -> bool:
    """Return whether a source seems to be a pair of an input and a target, or a dict of both.

    A class of the user's own is none: its methods may do anything.
    """
    if type(source) is dict:
        parts = list(source.values())
    else:
        parts = list(source) if type(source) in (tuple, list) and len(source) == 2 else []
    return any(isinstance(part, torch.Tensor) for part in parts)


def _is_unambiguous(reached: tuple[Any, Any] | None, position: Mapping[str, Any]) -> bool:
    """Return whether a sampler gave the numbers that it gave while items were loaded as well.

    It did if it drew only before its first number, or no item drew from the same generator.
    """
    if reached is None:
        return True
    first, last = ({**found["drawn"], **dict(enumerate(found["random"]))} for found in reached)
    loaded = {**position["drawn"], **dict(enumerate(position["random"]))}
    return all(
        equal_states(first[name], state) or equal_states(state, loaded.get(name))
        for name, state in last.items()
    )
