"""The workers of a generation: where each is forked, and which hosts copy their state. Pure.

Every worker copies its state into memory that the agent of its host keeps. Where no replica holds
what another one has, the next host of a ring keeps these copies as well. The launcher decides
whether a snapshot survives: it alone outlives both hosts and coordinators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from launcher.spec import assign_ranks
from pipeworker.coordinator.job import SLOTS
from pipeworker.job.options import Options
from pipeworker.wire.lines import Fork

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """The hosts of a generation's workers.

    Attributes:
        hosts: the number of its host, by rank.
        group: ranks that hold the whole state together; the ranks are divided into such groups.
        mirrored: whether the next host of the ring keeps the copies of each host as well.
        reader: the rank that alone knows the position in the data; -1 where every replica does.
        lost: hosts that were lost since these workers were started.
    """

    generation: int = 0
    hosts: tuple[int, ...] = ()
    group: int = 1
    mirrored: bool = False
    reader: int = _NOBODY
    lost: frozenset[int] = frozenset()

    def ranks_on(self, host: int) -> tuple[int, ...]:
        return tuple(rank for rank, where in enumerate(self.hosts) if where == host)

    @property
    def _previous(self) -> dict[int, int]:
        """The previous host of the ring, by host."""
        ring = list(dict.fromkeys(self.hosts))
        return dict(zip(ring, ring[-1:] + ring, strict=False))

    def mirrored_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of the previous host of the ring, whose copies this host keeps too."""
        return self.ranks_on(self._previous[host]) if self.mirrored else ()

    def survives(self) -> bool:
        """Return whether the hosts that are left have a whole copy of the state."""
        own = [host not in self.lost for host in self.hosts]
        if self.mirrored and all(not {*pair} <= self.lost for pair in self._previous.items()):
            return True
        if self.reader != _NOBODY and not own[self.reader]:
            return False
        starts = range(0, len(own), self.group)
        return any(all(own[start : start + self.group]) for start in starts)


@dataclass(slots=True)
class SnapshotCopies:
    """The layouts of the present generation and of the one that made the last snapshot, if any."""

    placed: Layout = field(default_factory=Layout)
    snapshot: Layout | None = None

    def place(self, layout: Layout) -> None:
        if replace(self.placed, lost=layout.lost) != layout:
            self.placed = layout

    def complete(self) -> bool:
        """Record a snapshot of all workers; return whether it survives losses since its report."""
        self.snapshot = self.placed
        return self.snapshot.survives()

    def lose(self, host: int, *, had_copies: bool = True) -> tuple[tuple[int, ...], bool]:
        """Record that the memory of a host is gone.

        Unless it `had_copies`, no worker of the present generation had used it: the host may still
        keep copies of this generation once it is started again.

        Returns:
            The ranks whose part of the last snapshot was there, and whether it survives.
        """
        held: tuple[int, ...] = ()
        if self.snapshot:
            held = () if host in self.snapshot.lost else self.snapshot.ranks_on(host)
            self.snapshot = replace(self.snapshot, lost=self.snapshot.lost | {host})
        placed = replace(self.placed, lost=self.placed.lost | {host})
        if had_copies:
            self.placed = placed
        return held, (self.snapshot or placed).survives()


_WORKER_TASKS = 12
"""Processes and threads of a worker with one intra-op thread: its own, ZeroMQ's, those that send
and copy, and the process that writes its checkpoints. Links over gloo replace two of its threads
by one for all of them and two for each.
"""
_STARTING_PER_HOST = 8
"""Workers that may be starting on a host, if it has fewer cores."""


class Forks:
    """The forks of a job's workers; `cores` are those of each host.

    Attributes:
        slots: the number of memories for copies of each worker's state.
        copies: the hosts that hold these copies.
    """

    def __init__(self, options: Options, token: str, cores: int) -> None:
        self._options, self._token, self._cores = options, token, cores
        self._hosts: dict[int, int] = {}  # by rank that was forked
        self._joined = 0
        self.generation = 1
        self.placement = options.placement
        self.slots = SLOTS if options.max_restarts else 1
        self.copies = SnapshotCopies()

    @property
    def complete(self) -> bool:
        """Whether all workers were forked."""
        return len(self._hosts) == self.placement.ranks

    def begin(self, generation: int, stages: int | None = None) -> None:
        """Begin a generation, with as many stages as the one before if `stages` is None."""
        self.generation = generation
        if stages is not None:
            self.placement = self._options.with_stages(stages).placement
        self._hosts.clear()
        self._joined = 0

    def join(self) -> None:
        """Record that a worker has described its model."""
        self._joined += 1

    def next_forks(self, places: Sequence[int], endpoints: Sequence[str]) -> list[tuple[int, Fork]]:
        """Return the workers to fork now, each with its host: a few of many.

        The first one of many shows whether the model has layers for all of them.

        Args:
            places: how many workers each host takes; together they suffice.
            endpoints: where the workers of each host connect to.
        """
        ranks = self.placement.ranks
        hosts = assign_ranks(places, ranks)
        layout = self._layout(hosts)
        self.copies.place(layout)
        few = max(_STARTING_PER_HOST, self._cores) * len(places)
        limit = 1 if ranks > few and not self._joined else few
        missing = [rank for rank in range(ranks) if rank not in self._hosts]
        found = []
        for rank in missing[: max(0, limit - len(self._hosts) + self._joined)]:
            host = self._hosts[rank] = hosts[rank]
            local_rank = rank - hosts.index(host)
            first = self.generation == 1 and not local_rank
            fork = Fork(
                rank,
                self.generation,
                endpoints[host],
                self._token,
                local_rank,
                self.slots,
                mirrors=() if local_rank else layout.mirrored_on(host),
                mirrored=layout.mirrored,
                tasks=self._tasks(host, hosts) if first else 0,
            )
            found.append((host, fork))
        return found

    def _tasks(self, host: int, hosts: Sequence[int]) -> int:
        """Return the processes and threads that all workers of a host need at least."""
        tasks = hosts.count(host) * (_WORKER_TASKS + self._options.threads - 1)
        ends = Counter(rank for link in self._gloo_links(hosts) for rank in link)
        return tasks + sum(2 * count - 1 for rank, count in ends.items() if hosts[rank] == host)

    def _gloo_links(self, hosts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the two ranks of each link of activations, gradients or targets over gloo."""
        placement, backend = self.placement, self._options.backend
        stages = placement.stages
        pairs = [*pairwise(range(stages))] * 2 + [(0, stages - 1)]
        for replica in range(placement.replicas):
            for pair in pairs:
                one, other = (placement.rank_of(stage, replica) for stage in pair)
                between = hosts[one] != hosts[other] and backend != "tls"
                if one != other and (between or backend == "gloo"):
                    yield one, other

    def uses(self, host: int) -> bool:
        """Return whether a host has a place in the layout of workers, some of which were forked."""
        return bool(self._hosts) and host in self.copies.placed.hosts

    def lose(self, host: int, *, had_workers: bool = True) -> tuple[tuple[int, ...], bool]:
        """Record that a host is lost, with its workers and the copies in its memory.

        `had_workers` is whether its agent had forked a worker since the agent was started.

        Returns:
            The ranks of both, and whether the last snapshot survives.
        """
        copies, survives = self.copies.lose(host, had_copies=had_workers)
        workers = [rank for rank, where in self._hosts.items() if where == host]
        for rank in workers:
            del self._hosts[rank]
        return tuple(sorted({*workers, *copies})), survives

    def _layout(self, hosts: Sequence[int]) -> Layout:
        options, placed = self._options, self.placement
        mirrored = self.slots > 1 and len({*hosts}) > 1 and not options.redundant
        group = placed.ranks if options.shard_optimizer else placed.workers
        reader = placed.rank_of(0) if options.data_reader == "first" else -1
        return Layout(self.generation, tuple(hosts), group, mirrored, reader)
