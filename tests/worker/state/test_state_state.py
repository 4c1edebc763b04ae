"""Which snapshots a worker reads after a loss."""

from __future__ import annotations

import pytest

from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.plan import Plan
from pipeworker.worker.settings import Role
from pipeworker.worker.state.state import needed_ranks

PLAN = Plan((), (), (), (), "", ())


@pytest.mark.parametrize(
    ("before", "sharded", "needed"), [(2, False, [1]), (1, False, [0]), (2, True, [0, 1])]
)
def test_a_worker_of_two_needs_the_snapshots_that_hold_its_state(
    before: int, sharded: bool, needed: list[int]
) -> None:
    """Two shards may be of one worker in each of two replicas: neither has one stage alone."""
    placement = Placement.looped(2, 1).copies(2)
    restore = Restore(8, slot=0, ranks=before)
    options = Options("job.py", stages=2, microbatches=2, replicas=2, shard_optimizer=sharded)
    assert needed_ranks(restore, PLAN, Role(3, placement, options)) == needed
