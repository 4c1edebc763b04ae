"""What all workers of a job must have alike, and who has not. Pure.

That is versions, the job's files, and the settings of torch's that its numbers depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeworker.coordinator.roster import Member
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.presence import Hello

T = TypeVar("T")


def on_versions(members: Iterable[Member]) -> str:
    """Who runs other versions than most, and which; empty where all run the same.

    Args:
        members: by rank; where there are as many of either, that of rank 0 is the right one.
    """
    hellos = [member.hello for member in members]
    right = _usual([hello.versions for hello in hellos])
    for hello in hellos:
        if hello.versions != right:
            odd = [version for version in hello.versions if version not in right]
            there = [version for version in right if version not in hello.versions]
            return (
                f"{who(hello)} runs {', '.join(odd) or 'nothing that is known'}, and others "
                f"{', '.join(there)}: all hosts of a job need the same versions"
            )
    return ""


def on_sources(members: Iterable[Member]) -> str:
    """Whose job file, or a file that it imports, is another than most have; empty where none is.

    A file that some have not imported is none that differs.
    """
    pairs = [(member.hello, _sources(member.described)) for member in members]
    for name in dict.fromkeys(name for _, sources in pairs for name in sources):
        having = [(hello, sources[name]) for hello, sources in pairs if name in sources]
        right = _usual([digest for _, digest in having])
        for hello, digest in having:
            if digest != right:
                other = next(hello for hello, digest in having if digest == right)
                return (
                    f"{name} is not the same on all hosts: {who(hello)} has another one than "
                    f"{who(other)}"
                )
    return ""


def on_settings(members: Iterable[Member]) -> str:
    """Where torch is set otherwise than on most, and how; empty where it is alike on all."""
    pairs = [(member.hello, member.described.settings) for member in members if member.described]
    right = _usual([settings for _, settings in pairs])
    for hello, settings in pairs:
        if settings != right:
            odd = [setting for setting in settings if setting not in right]
            there = [setting for setting in right if setting not in settings]
            other = next(hello for hello, found in pairs if found == right)
            return (
                f"{who(hello)} has {', '.join(odd) or 'no such setting'}, and {who(other)} "
                f"{', '.join(there) or 'none of it'}: the numbers of a job depend on it, so set it "
                "in the job file for all workers, or in the environment of all"
            )
    return ""


def who(hello: Hello) -> str:
    """A worker and its host."""
    return f"rank {hello.rank} on {hello.host}"


def _usual(values: Sequence[T]) -> T:
    """What most have; the first of those that as many have."""
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])


def _sources(described: Described | None) -> Mapping[str, str]:
    return {source.name: source.digest for source in described.sources} if described else {}
