"""Comparison of the workers: versions, job files and torch settings must be equal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeworker.coordinator.roster import Member

T = TypeVar("T")


def version_mismatch(members: Iterable[Member]) -> str:
    """Return which worker runs other versions than most, or an empty string.

    With equal numbers of both, those of the lowest rank count as right.
    """
    mismatch = _mismatch([(member, member.hello.versions) for member in members])
    if mismatch is None:
        return ""
    (odd, versions), (_, usual) = mismatch
    return (
        f"{_name(odd)}: it runs {_only_in(versions, usual) or 'unknown versions'}, and others "
        f"{_only_in(usual, versions)}; install the same versions on all hosts"
    )


def source_mismatch(members: Iterable[Member]) -> str:
    """Return which worker has another job file than most, or another file it imports, or "".

    A file that only some workers have imported is no mismatch.
    """
    digests: dict[str, list[tuple[Member, str]]] = {}
    for member in members:
        for source in member.described.sources if member.described else ():
            digests.setdefault(source.name, []).append((member, source.digest))
    for name, found in digests.items():
        if mismatch := _mismatch(found):
            (odd, _), (other, _) = mismatch
            return (
                f"{name}: {_name(odd)} has another version of it than {_name(other)}; it must be "
                "the same on all hosts"
            )
    return ""


def changed_sources(members: Iterable[Member], known: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files that the workers have loaded with another digest than the known one."""
    found = {(s.name, s.digest) for m in members if m.described for s in m.described.sources}
    return tuple(sorted(name for name, digest in found if known.get(name, digest) != digest))


def settings_mismatch(members: Iterable[Member]) -> str:
    """Return which worker has other torch settings than most, or an empty string."""
    mismatch = _mismatch([(m, m.described.settings) for m in members if m.described])
    if mismatch is None:
        return ""
    (odd, settings), (other, usual) = mismatch
    return (
        f"{_name(odd)}: it has {_only_in(settings, usual) or 'no such setting'}, and "
        f"{_name(other)} {_only_in(usual, settings) or 'none'}; the numbers of a job depend on it, "
        "so set it in the job file, or in the environment of all workers"
    )


def _mismatch(values: Sequence[tuple[Member, T]]) -> tuple[tuple[Member, T], ...] | None:
    """Return the first member with another value than most, and the first with the usual one."""
    usual, _ = Counter(value for _, value in values).most_common(1)[0]
    odd = [one for one in values if one[1] != usual]
    return (odd[0], next(one for one in values if one[1] == usual)) if odd else None


def _only_in(values: Iterable[str], others: Iterable[str]) -> str:
    return ", ".join(value for value in values if value not in others)


def _name(member: Member) -> str:
    return f"rank {member.hello.rank} on {member.hello.host}"
