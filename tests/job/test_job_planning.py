"""The plan of a run, made again from what its directory records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeworker.job.options import Options
from pipeworker.job.planning import plan_job, plan_run
from pipeworker.plan.orders import resolve
from pipeworker.plan.planner.planner import whole_text
from support.pure.facts import layer, network

FACTS = network([layer(1.0, 2.0)] * 4)


@pytest.mark.parametrize("recompute", ["auto", "always", "never", "offload"])
def test_the_plan_of_a_searched_schedule_is_made_again(recompute: str) -> None:
    options = Options("job.py", 2, 6, schedule="auto", recompute=recompute)
    plan = plan_job(FACTS, options)
    schedule = whole_text(plan, resolve(plan.order, plan.virtual_stages), plan.name)
    again = plan_run(FACTS, options, plan.balance, schedule)
    assert again.step_seconds == plan.step_seconds
    # Of a mini-batch with fewer samples than that the run records fewer micro-batches.
    more = replace(options, microbatches=16, replicas=2)
    assert plan_run(FACTS, more, plan.balance, schedule).schedule.microbatches == 6
