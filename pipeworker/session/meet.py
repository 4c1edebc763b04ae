"""How the ranks of a job meet: each says where it is, and rank 0 where its coordinator is.

They meet at a store, which may be one where earlier ranks have met: torchrun keeps it when it
starts ranks again, in whatever number, and those of a node that is new count restarts from 0. So
rank 0 gives each meeting a name of its own, and the others go by one only when it has heard them
there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeworker.environment import timings
from pipeworker.errors import AGAIN, NotMet, PipeworkerError, UsageError, of_status
from pipeworker.session.begin import Begun
from pipeworker.session.head import Head, Hear
from pipeworker.session.place import Place, await_others
from pipeworker.wire.interfaces import unreached
from pipeworker.wire.keys import TOKEN_VARIABLE, new_token
from pipeworker.wire.lines import Warned
from pipeworker.wire.sockets import WORKER, check_room

if TYPE_CHECKING:
    from pipeworker.worker.internals import Store


@dataclass(frozen=True, slots=True)
class Meeting:
    """The coordinator as a rank knows it; `head` on rank 0 alone."""

    endpoint: str
    token: str
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a rank says of itself.

    Attributes:
        word: that no other rank says, of this meeting or another.
        host: its name; `identity` is equal for processes of one host.
        restart: how often torchrun has started its node's ranks again.
        master: the address that the first host's name has here; there it may be a loopback's.
        mistake: why it cannot take part; empty where it can.
    """

    word: str
    host: str
    identity: str
    restart: int
    master: str
    mistake: str = ""

    @staticmethod
    def of(place: Place, mistake: str = "") -> Greeting:
        """This process's."""
        from pipeworker.worker.transport.links.shared import host_identity

        word, here = secrets.token_hex(8), socket.gethostname()
        master = place.master_address()
        return Greeting(word, here, host_identity(), place.restart, master, mistake)

    @staticmethod
    def read(text: bytes) -> Greeting:
        """As JSON has it.

        Raises:
            PipeworkerError: it is nothing that a rank of this version says.
        """
        try:
            found = Greeting(**json.loads(text))
        except (ValueError, TypeError):
            raise PipeworkerError(_OTHERS) from None
        if not all(type(getattr(found, f.name)).__name__ == f.type for f in _FIELDS):
            raise PipeworkerError(_OTHERS)
        return found


_FIELDS = dataclasses.fields(Greeting)
_OTHERS = (
    "at the store where the ranks meet, something speaks that is no rank of this job, or one of "
    "another version of pipeworker"
)


def meet(
    place: Place,
    name: str,
    begin: Callable[[int], Begun],
    listen: Callable[[Begun], Hear],
) -> Meeting:
    """Start the coordinator on rank 0, learn of it on the others.

    Args:
        name: of the job among those that meet at the same store.
        begin: begins the run, given how often ranks were started again; called on rank 0 alone.
        listen: given the run, gives who is told what the coordinator says.

    Raises:
        UsageError: the ranks cannot meet, or one of them has made a mistake.
        NotMet: a rank does not come, or does not reach the coordinator.
        PipeworkerError: the coordinator did not start.
    """
    _check_room(place)
    token = os.environ.get(TOKEN_VARIABLE)
    if place.world == 1:
        token = token or new_token()
        begun = begin(place.restart)
        head = Head(begun, token, "127.0.0.1", _told(begun, listen))
        return Meeting(head.endpoint, token, head)
    store = place.store()
    if place.rank:
        said = _join(place, store, name)
        return Meeting(said["endpoint"], token or said["token"])
    return _Host(place, store, f"pipeworker/{name}").meet(token, begin, listen)


def refuse(place: Place, name: str, mistake: str) -> None:
    """Have rank 0 say what is wrong on this rank, which cannot take part.

    Where all ranks make the same mistake rank 0 does not listen; it is given its time.
    """
    with suppress(PipeworkerError, RuntimeError, TimeoutError):
        _hear(place, place.store(), name, Greeting.of(place, mistake), timings().speak)


class _Host:
    """Rank 0 at a meeting."""

    def __init__(self, place: Place, store: Store, name: str) -> None:
        self._place, self._store = place, store
        self._key = f"{name}/{secrets.token_hex(8)}"
        self._others = range(1, place.world)
        store.set(name, self._key)

    def meet(
        self,
        token: str | None,
        begin: Callable[[int], Begun],
        listen: Callable[[Begun], Hear],
    ) -> Meeting:
        greetings = self._gather()
        words = [greeting.word for greeting in greetings.values()]
        try:
            for rank in self._others:
                _check(rank, greetings)
            mine = Greeting.of(self._place)
            begun = begin(max(greeting.restart for greeting in (mine, *greetings.values())))
            apart = [g for g in greetings.values() if g.identity != mine.identity]
            one_host, interface = not apart, begun.options.interface
            seen = [greeting.master for greeting in apart]
            address = self._place.coordinator_address(one_host, interface, seen)
            hear = _told(begun, listen)
            through_store = "" if token else new_token()
            if through_store and not one_host:  # on one, the coordinator is on loopback
                _warn(
                    f"{TOKEN_VARIABLE} is not set: the token goes through torchrun's store, which "
                    "anyone who reaches its port can read",
                    hear,
                )
            token = token or through_store
            head = Head(begun, token, address, hear)
        except PipeworkerError as error:  # the others are waiting
            self._say(words, error=str(error), status=error.exit_status)
            raise
        self._say(words, endpoint=head.endpoint, token=through_store, one_host=one_host)
        if not one_host:
            self._await_reached(head, greetings)
        return Meeting(head.endpoint, token, head)

    def _gather(self) -> dict[int, Greeting]:
        """What the others say of themselves, by rank.

        Raises:
            NotMet: some do not come.
        """
        try:
            return {rank: Greeting.read(said) for rank, said in self._answers("here").items()}
        except TimeoutError as error:
            there = self._there("here")
            missing = ", ".join(str(rank) for rank in self._others if rank not in there)
            text = f"rank {missing} did not come to the job: {error}"
            came = [Greeting.read(self._store.get(self._named("here", rank))) for rank in there]
            self._say([greeting.word for greeting in came], error=text, status=AGAIN)
            raise NotMet(text) from None

    def _await_reached(self, head: Head, greetings: dict[int, Greeting]) -> None:
        """Hear from all others that they reach the coordinator.

        Raises:
            NotMet: one does not.
        """
        try:
            wrong = {rank: why.decode() for rank, why in self._answers("reached").items() if why}
        except TimeoutError as error:
            there = self._there("reached")
            wrong = {
                rank: f"rank {rank} on {greetings[rank].host} did not say that it reaches the "
                f"coordinator: {error}"
                for rank in self._others
                if rank not in there
            }
        for rank, why in wrong.items():
            head.give_up(rank, why)
            raise NotMet(why)

    def _answers(self, what: str) -> dict[int, bytes]:
        """What the others answer, by rank, once all have.

        Raises:
            TimeoutError: they do not.
        """
        keys = [self._named(what, rank) for rank in self._others]
        await_others(lambda: self._store.check(keys))
        return dict(zip(self._others, map(self._store.get, keys), strict=True))

    def _there(self, what: str) -> list[int]:
        """The ranks that have answered so far."""
        return [r for r in self._others if self._store.check([self._named(what, r)])]

    def _named(self, what: str, rank: int) -> str:
        return f"{self._key}/{what}/{rank}"

    def _say(self, to: list[str], **said: Any) -> None:
        self._store.set(f"{self._key}/said", json.dumps({"to": to, "error": "", **said}))


def _check(rank: int, greetings: dict[int, Greeting]) -> None:
    greeting = greetings[rank]
    if greeting.mistake:
        raise UsageError(f"rank {rank} on {greeting.host}: {greeting.mistake}")


def _join(place: Place, store: Store, name: str) -> dict[str, Any]:
    """What rank 0 says at a meeting where it has heard this rank.

    Raises:
        UsageError: rank 0 cannot begin.
        NotMet: it does not come, or its coordinator is out of reach.
    """
    greeting = Greeting.of(place)
    try:
        key, said = _hear(place, store, name, greeting, timings().meet)
    except (RuntimeError, TimeoutError) as error:
        raise NotMet(f"rank 0 did not start the job: {error}") from None
    if said["error"]:
        raise of_status(said["status"])(said["error"])
    if not said["one_host"]:
        wrong = _unreachable(said["endpoint"])
        wrong = wrong and f"rank {place.rank} on {greeting.host} {wrong}"
        store.set(f"{key}/reached/{place.rank}", wrong)
        if wrong:
            raise NotMet(wrong)
    return said


def _hear(
    place: Place, store: Store, name: str, greeting: Greeting, seconds: float
) -> tuple[str, dict[str, Any]]:
    """Greet rank 0; returns the meeting at which it has heard that, and what it says there.

    Raises:
        TimeoutError: it says nothing.
        RuntimeError: the store is gone.
    """
    text = json.dumps(dataclasses.asdict(greeting))
    key = ""
    said: dict[str, Any] = {}

    def heard() -> bool:
        nonlocal key, said
        if not store.check([f"pipeworker/{name}"]):
            return False
        if (now := store.get(f"pipeworker/{name}").decode()) != key:
            key = now
            store.set(f"{key}/here/{place.rank}", text)
        if not store.check([f"{key}/said"]):
            return False
        said = json.loads(store.get(f"{key}/said"))
        return greeting.word in said["to"]

    await_others(heard, seconds)
    return key, said


def _unreachable(endpoint: str) -> str:
    """Why the coordinator cannot be reached from here; empty where it can."""
    why = unreached(endpoint, timings().reach)
    return why and (
        f"cannot reach the coordinator at {endpoint}: {why}. If another interface of rank 0's host "
        "leads there, name it with --interface; if a firewall is between, let the hosts of a job "
        "reach each other at all ports"
    )


def _told(begun: Begun, listen: Callable[[Begun], Hear]) -> Hear:
    """Who listens, and has been told how the run begins."""
    hear = listen(begun)
    for text in begun.warnings:
        _warn(text, hear)
    return hear


def _warn(text: str, hear: Hear) -> None:
    with suppress(OSError):  # that nobody reads it shows again
        hear(Warned(text))


def _check_room(place: Place) -> None:
    try:
        check_room(*WORKER)
    except OSError as error:
        raise PipeworkerError(f"rank {place.rank} cannot start: {error.strerror}") from None
