"""Balances compared by the measured step time of real jobs whose layers sleep.

First, small networks of unequal layers: the balance that `launch` chooses, even stages, and all
balances, of which the best is found by brute force. Then the networks of `balance.py`, with the
times of their layers scaled so that sending takes no time beside them: the chosen balance, even
stages, and those of torchgpipe's and DeepSpeed's rules.

    python benchmarks/balance_measured.py [--steps 8] [--only brute-force]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

from balance import NETWORKS, balances
from launches import SKIPPED_STEPS, launched

from pipeworker.plan.partition import even

JOB = Path(__file__).resolve().with_name("balance_job.py")
BYTES = 4096
LONGEST = 0.1
"""Seconds of a forward of a whole scaled network."""


class Measured(NamedTuple):
    """A balance, and the median duration of its steps in seconds."""

    seconds: float
    balance: tuple[int, ...]


def measure(
    seconds: Sequence[float], stages: int, microbatches: int, steps: int, options: str = ""
) -> Measured:
    """Run a job of layers whose forwards take so many seconds."""
    shape = f"--stages {stages} --microbatches {microbatches} --steps {SKIPPED_STEPS + steps}"
    words = (json.dumps([*seconds]), len(seconds), BYTES, microbatches)
    with tempfile.TemporaryDirectory() as cache:
        env = {"XDG_CACHE_HOME": cache}
        with launched(JOB, f"{shape} --recompute never {options}", *words, env=env) as run:
            return Measured(run.seconds, tuple(run.read("plan")["balance"]))


def given(balance: Sequence[int]) -> str:
    return f"--balance {','.join(map(str, balance))}"


def brute_force(steps: int) -> None:
    """Compare the chosen balance with all of them."""
    print("small networks: ms a step; chosen, even, and the best of all balances")
    for stages, layers, seed in ((2, 10, 1), (2, 10, 2), (3, 7, 3), (3, 7, 4)):
        drawn = random.Random(seed)
        seconds = [drawn.randint(1, 9) / 1000 for _ in range(layers)]
        microbatches = 4 * stages
        found = []
        for cuts in combinations(range(1, layers), stages - 1):
            balance = tuple(b - a for a, b in pairwise((0, *cuts, layers)))
            found.append(measure(seconds, stages, microbatches, steps, given(balance)))
        chosen = measure(seconds, stages, microbatches, steps)
        best = min(found)
        usual = next(one for one in found if one.balance == even(layers, stages))
        print(
            f"K={stages}, {layers} layers: {1e3 * chosen.seconds:7.1f} {chosen.balance}"
            f"  even {1e3 * usual.seconds:7.1f}  best of {len(found)} {1e3 * best.seconds:7.1f} "
            f"{best.balance}  chosen/best {chosen.seconds / best.seconds:.3f}",
            flush=True,
        )


def networks(steps: int, stages: int = 4, microbatches: int = 16) -> None:
    """Compare the chosen balance with those of other rules."""
    print(f"networks: K={stages}, M={microbatches}; share of the chosen balance's speed")
    for name, make in NETWORKS.items():
        facts = make()
        scale = LONGEST / sum(layer.forward for layer in facts.layers)
        seconds = [layer.forward * scale for layer in facts.layers]
        own = measure(seconds, stages, microbatches, steps)
        print(f"{name}: {1e3 * own.seconds:.1f} ms {own.balance}", flush=True)
        for rule, balance in balances(facts, stages).items():
            other = measure(seconds, stages, microbatches, steps, given(balance))
            print(f"  {rule:12}{own.seconds / other.seconds:.2f}  {balance}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=("brute-force", "networks"))
    args = parser.parse_args()
    if args.only != "networks":
        brute_force(args.steps)
    if args.only != "brute-force":
        networks(args.steps)


if __name__ == "__main__":
    main()
