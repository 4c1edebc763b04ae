"""One pass over the user's data: what it gives, and where it stands.

A position is a plain value. It has ``epoch``, ``read`` (how many mini-batches that epoch has given)
and, where the user has generators of their own, ``began``: their states when the epoch began. What
was read is read again. A source that keeps a state (``state_dict`` and ``load_state_dict``) is not
read again: the position also has ``source``, this state, ``over``, whether it has given all,
``drawn``, the states of its generators, and ``random``, those of the stream.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, RandomSampler

from pipeworker.errors import UsageError
from pipeworker.worker.blame import users
from pipeworker.worker.stage import rng
from pipeworker.worker.step import generators

END = object()
"""What comes after the last mini-batch."""

_MOST = 2**63 - 1
_WITH_STATE = {"source", "over", "drawn", "random"}
_KINDS = {"began": dict, "source": object, "over": bool, "drawn": dict, "random": tuple}


def checked(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """A position that anybody may have made.

    Raises:
        UsageError: it is none.
    """

    def refuse(why: str) -> NoReturn:
        raise UsageError(f"{generators.REFUSED}: {why}")

    if not isinstance(position, Mapping):
        refuse(f"it is a {type(position).__name__}")
    for name in ("epoch", "read"):
        number = position.get(name)
        if type(number) is not int or not 0 <= number <= _MOST:
            refuse(f"{name} is {reprlib.repr(number)}")
    for name, value in position.items():
        if name not in ("epoch", "read") and not isinstance(value, _KINDS.get(name, ())):
            refuse(f"{reprlib.repr(name)} is {reprlib.repr(value)}")
    if len(_WITH_STATE & position.keys()) not in (0, len(_WITH_STATE)):
        refuse(f"it has not all of {', '.join(sorted(_WITH_STATE))}")
    return position


class Epoch:
    """A pass over data; it is made, and all is done with it, in the data's random stream.

    Args:
        data: the job file's ``data``, or ``evaluation``; `name`, which of them.
        stream: the one it is in.
        position: one of this epoch, :func:`checked`; a source that keeps a state goes on there, any
            other begins as it did.

    Attributes:
        count: of the mini-batches it has given.
        stateful: its source keeps a state.
        one_shot: its source is an iterator, which cannot be started again.
    """

    def __init__(
        self,
        data: Any,
        name: str,
        number: int,
        stream: rng.Stream,
        position: Mapping[str, Any],
    ) -> None:
        self.number = number
        self.count = 0
        self._name = name
        self._stream = stream
        self._ended = False
        self._before: dict[str, Any] = {}  # what a stateful source was before the last read
        began = position.get("began", {})
        with users(f"{name}()"):
            own = generators.around(data) if callable(data) else {}
            generators.put_back(own, began)
            self._began = generators.states(own)
            source = self._source = data() if callable(data) else data
            self.stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
            loader = isinstance(source, DataLoader)
            if loader or not self.stateful:  # any other answers for its generators itself
                more = generators.within(source)
                generators.put_back(more, began)
                self._began |= generators.states(more)
                own |= more
            self._found, self._own = own, own if loader else {}
            if "source" in position:
                self._load(position["source"])
            self._iterator = self._iterate(source)
            self.one_shot = self._iterator is data
        if "source" in position:
            generators.put_back(self._own, position["drawn"])
            generators.put_back_stream(stream, position["random"])
            self.count = position["read"]
            # With the state of its end a source may give its end, or what comes after it.
            self._ended = position["over"]

    def _load(self, state: Any) -> None:
        if not self.stateful:
            raise UsageError(
                f"{self._name}() gave a {type(self._source).__name__}, which has no "
                "load_state_dict: the state in the checkpoint is that of other data"
            )
        self._source.load_state_dict(copy.deepcopy(state))

    def _iterate(self, source: Any) -> Iterator[Any]:
        if hasattr(source, "__iter__"):
            return iter(source)
        if hasattr(source, "__getitem__"):
            return (source[index] for index in range(len(source)))
        raise UsageError(
            f"{self._name}() gave a {type(source).__name__}: it must be an iterable of (input, "
            "target) mini-batches"
        )

    @property
    def length(self) -> int:
        """Mini-batches that its source says it has; 0 where it does not say."""
        try:
            return len(self._source)
        except Exception:  # of the user's: what is only shown ends no job
            return 0

    def take(self) -> Any:
        """The next mini-batch, or END."""
        if self._ended:
            return END
        if self.stateful:
            self._before = self._now()
        with users(f"{self._name}()"):
            item = next(self._iterator, END)
        self._ended = item is END
        self.count += not self._ended
        return item

    def skip(self, count: int) -> None:
        """Take so many.

        Raises:
            UsageError: there are fewer.
        """
        for _ in range(count):
            if self.take() is END:
                raise UsageError(
                    f"{self._name}() gave {self.count} mini-batches in epoch {self.number}, "
                    "fewer than were read before the checkpoint: it is not the same data"
                )

    def rewind(self) -> None:
        """Let the user's own generators draw as when it began."""
        generators.put_back(self._found, self._began)

    def position(self, back: bool) -> dict[str, Any]:
        """Where it stands; with `back`, before the last mini-batch it gave."""
        found: dict[str, Any] = {"epoch": self.number, "read": self.count - back}
        if self._began:
            found["began"] = self._began
        if self.stateful:
            found |= self._before if back else self._now()
        return found

    def _now(self) -> dict[str, Any]:
        """What a source that keeps a state needs to go on from here."""
        source, own, over = self._source, self._own, self._ended
        with users(f"{self._name}()"):
            state = copy.deepcopy(source.state_dict())
            if hasattr(source, "__len__") and not isinstance(source, DataLoader):
                over = over or len(source) == self.count
            sampler = getattr(source, "sampler", None)
        if isinstance(sampler, RandomSampler) and not over:  # draws again when it goes on
            own = {name: drawn for name, drawn in own.items() if drawn is not sampler.generator}
        drawn = generators.states(own)
        return {"source": state, "over": over, "drawn": drawn, "random": self._stream.states()}
