"""What a worker tells the coordinator of the job's model, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.wire.messages.plan import Described, SkipRoute, TiedWeights
from pipeworker.wire.messages.position import Phase
from pipeworker.worker.blame import users
from pipeworker.worker.brought import Brought
from pipeworker.worker.device import numerics
from pipeworker.worker.model import survey
from pipeworker.worker.model.model import Model
from pipeworker.worker.model.structures import classes_of
from pipeworker.worker.role import Role


def describe(
    brought: Brought,
    model: Model,
    role: Role,
    tracker: Tracker,
    sample: Any,
    first: Callable[[], Any],
) -> tuple[Described, dict[str, type]]:
    """What is said, and the classes of the user's by the names it tells others.

    Args:
        sample: an input of the model, of a job that has no data and whose layers stash and pop.
        first: reads the first mini-batch; returns the input of its first micro-batch.

    Raises:
        SkipError: stashes and pops do not match.
        Raised: what the user's code raised.
    """
    options = role.options
    stashes = sample is not None or (
        not options.own_loop and survey.mentions_skips(brought.modules())
    )
    skips: tuple[SkipRoute, ...] = ()
    if stashes and role.rank == role.placement.rank_of(0):
        tracker.set(Phase.READING)
        value = sample if options.own_loop else first()
        found = model.skips(value, options.precision)
        skips = tuple(SkipRoute(skip.source, skip.target, skip.name) for skip in found)
    with users("model()", early=True):
        ties = tuple(TiedWeights(tie.names, ()) for tie in model.ties())
        digest = model.digest()
    classes = classes_of(brought.modules())  # those that model() imported among them
    names = model.names if model.names != tuple(map(str, range(len(model.names)))) else ()
    types = tuple(classes)
    files = brought.files()
    notes = job_file.notes(brought.job, options)
    said = (model.classes, skips, ties, digest, types, names, files, notes, numerics.settings())
    return Described(role.rank, *said), classes
