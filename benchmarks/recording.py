"""The cost of recording what workers do: steps with rows of some steps, of all, and of none.

The layers sleep. Each round runs the three in turn; the figures are medians of their ratios to the
steps without rows. The marks of the begin and end of every action, which are always made, are
measured by themselves: seconds of a loop over actions that do nothing, with marks and without.

    python benchmarks/recording.py [--rounds 5] [--stages 8] [--microbatches 32] [--forward 0.01]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter

from launches import step_seconds

from pipeworker.trace.ring import Ring

HERE = Path(__file__).resolve()
ACTIONS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--forward", type=float, default=0.010)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    k, m = args.stages, args.microbatches
    words = (str(k), str(args.forward), "65536", str(m))
    some, every = [], []
    for _ in range(args.rounds):

        def step(job: str, options: str = "") -> float:
            path = HERE.with_name(job)
            return step_seconds(path, k, m, args.steps, "never", *words, options=options)

        none = step("unrecorded_job.py")
        some.append(step("emulated_job.py") / none)
        every.append(step("emulated_job.py", "--trace") / none)
    shares = [f"{statistics.median(ratios) - 1:+.2%}" for ratios in (some, every)]
    print(f"K={k} M={m}: some steps recorded {shares[0]}, all {shares[1]}")
    print(f"marks: {marks() * 1e6:.2f} us an action")


def marks() -> float:
    """Return the seconds that the marks of one action take."""
    times = Ring().begin(1, 0, 1, ACTIONS, perf_counter())

    def nothing(_: int) -> None: ...

    handlers = [(nothing, number, False) for number in range(ACTIONS)]
    found = []
    for _ in range(20):
        began = perf_counter()
        for handle, microbatch, on_device in handlers:
            if on_device:
                continue
            handle(microbatch)
        middle = perf_counter()
        at, now = 0, perf_counter
        for handle, microbatch, on_device in handlers:
            times[at] = now()
            if on_device:
                continue
            handle(microbatch)
            times[at + 1] = now()
            at += 2
        end = perf_counter()
        found.append(((end - middle) - (middle - began)) / ACTIONS)
    return statistics.median(found)


if __name__ == "__main__":
    main()
