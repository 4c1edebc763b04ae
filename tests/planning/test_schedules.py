"""Every schedule in real processes: the bits are those of one stage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, Run
from support.real_jobs.ranks import LOOP, Scripts, script
from support.real_jobs.sources import VARIED, VARIED_WORDS
from support.slow import slow

TRAIN = """
    pipeworker.train(
        model, loss=loss, optimizer=optimizer, data=data, evaluation=evaluation, microbatches=6,
        evaluate_every=4, clip_grad_norm=0.5, run_dir="run", **json.loads(os.environ["OPTIONS"])
    )
"""


def check(run: Run, one: Record, schedule: str, stages: int) -> None:
    """Compare a run with that of one stage, and with what was asked for."""
    assert_same(one, run)
    assert (one.path / "evaluation.jsonl").read_text() == (
        run.path / "evaluation.jsonl"
    ).read_text()
    assert run.plan["schedule"] == schedule
    assert len(run.plan["stages"]) == stages


@pytest.mark.parametrize(
    ("schedule", "workers", "words", "stages"),
    [
        ("1f1b", 3, ("--recompute", "except_first"), 3),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("interleaved-1f1b", 2, ("--virtual-stages", "3", "--recompute", "never"), 6),
                ("v-min", 3, ("--recompute", "never"), 6),
                ("dualpipev", 2, ("--balance", "1,4,3,2", "--recompute", "never"), 4),
            )
        ),
    ],
)
def test_every_schedule_gives_the_same_bits(
    jobs: Jobs,
    reference: Reference,
    schedule: str,
    workers: int,
    words: tuple[str, ...],
    stages: int,
) -> None:
    run = jobs.train(
        *("--stages", str(workers), "--schedule", schedule, *words), *VARIED_WORDS, source=VARIED
    )
    check(run, reference("--stages", "1", *VARIED_WORDS, source=VARIED), schedule, stages)


@pytest.mark.parametrize(
    ("options", "ranks", "stages"),
    [
        ({"schedule": "zb-h1", "recompute": "never"}, 3, 3),
        ({"schedule": "v-half", "recompute": "never"}, 2, 4),
        ({"schedule": "zbv", "recompute": "except_first"}, 2, 4),
        ({"schedule": "interleaved-1f1b", "recompute": "always", "virtual_stages": 2}, 3, 6),
    ],
)
@slow
def test_ranks_of_a_script_run_every_schedule(
    scripts: Scripts, reference: Reference, options: dict[str, Any], ranks: int, stages: int
) -> None:
    ran = scripts.start(script(VARIED, TRAIN), ranks, OPTIONS=json.dumps(options))
    run = ran.succeed()[0]
    check(
        run, reference("--stages", "1", *VARIED_WORDS, source=VARIED), options["schedule"], stages
    )


STILL = VARIED.replace("        return nn.Sequential(", "        net = nn.Sequential(").replace(
    """nn.Linear(8, 3),
        )
""",
    """nn.Linear(8, 3),
        )
        for index in (0, 1, 2, 7):
            net[index].requires_grad_(False)
        return net
""",
)
"""The first three layers are frozen, and one behind them; a skip begins at one of the first."""


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("gpipe", ("--balance", "1,2,4,3")),
        ("zbv", ("--balance", "3,4,1,2", "--stages", "2")),
    ],
)
@slow
def test_frozen_layers_at_the_front_have_no_backward(
    jobs: Jobs, reference: Reference, schedule: str, words: tuple[str, ...]
) -> None:
    run = jobs.train("--stages", "4", "--schedule", schedule, *words, *VARIED_WORDS, source=STILL)
    one = reference("--stages", "1", *VARIED_WORDS, source=STILL)
    check(run, one, schedule, 4)
    head, first = run.plan["actions"][:2]
    assert head.endswith("frozen=0,1" if schedule == "gpipe" else "frozen=0,2")
    assert {"0F0", "0L0"} <= {*first.split()}
    assert not {"0R0", "0B0", "0I0", "0<G0"} & {*first.split()}


def test_results_of_an_own_loop_pass_a_frozen_front(scripts: Scripts) -> None:
    """Over the channels of gradients, which its schedule does not use there."""
    source = STILL.replace("Down(8, 8)", "nn.Linear(8, 8)").replace("Up(8, 8)", "nn.Linear(8, 8)")
    ran = scripts.start(script(source, LOOP), 2, OPTIONS=json.dumps({"balance": "3,7"}))
    ran.succeed()
    reports = [ran.reported(rank) for rank in range(2)]
    assert len(reports[0]["loss"]) == 5
    assert reports[0] == reports[1]
