"""GPipe's table 2: normalised throughput by workers and micro-batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launches import SKIPPED_STEPS, step_seconds
from parts import plain

from papers.networks import AMOEBANET, SAMPLES, TRANSFORMER, UNET, Network, Stages, stages_of
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.simulate import Costs, simulate

TEXT = """\
The layers of the real networks are measured on this machine, one after the other, with one
sample; `pipeworker plan` divides them. Each stage is then an emulated accelerator: a process that
sleeps as long, on a scale on which a stage's forward takes 10 ms (M=32), 20 ms (M=4) or 40 ms
(M=1) on the average. All recompute, as in the paper. The unit is the speed of one process that
computes, recomputes and differentiates the same micro-batches in all stages in turn: GPipe's K=2
and M=1 is as slow as that, while pipeworker's recompute waits for no gradient. "Its limit" is the
simulated schedule with the stages as that process measures them, and free transfers. Messages of
64 KB a sample stand for the real ones, which this machine copies as slowly as it computes.
torchgpipe's U-Net is here too, by workers and micro-batches; its own figures are in the next table.
"""
JOB = Path(__file__).parents[1].resolve() / "papers_job.py"
BYTES = 64 << 10
"""Bytes of a sample between two stages: this machine copies more as slowly as it computes."""
WORKERS = (2, 4, 8)
SECONDS = {1: 0.040, 4: 0.020, 32: 0.010}
"""The mean time of a micro-batch's forward on one accelerator, by the number of micro-batches."""
PAPER = {
    AMOEBANET: ((1.0, 1.07, 1.21), (1.13, 1.26, 1.84), (1.38, 1.72, 3.48)),
    TRANSFORMER: ((1.0, 1.7, 1.8), (1.07, 3.2, 3.4), (1.3, 4.8, 6.3)),
    UNET: (("",) * 3,) * 3,
}
"""Table 2 of 1811.06965: by workers, by micro-batches. torchgpipe's authors chose M for U-Net."""
BETTER = "--schedule interleaved-1f1b --virtual-stages 2"


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    ours = "ours, `gpipe` | its limit | `interleaved-1f1b` | its limit"
    yield f"| network | K | M | GPipe | {ours} |"
    yield "|---|---|---|---|---|---|---|---|"
    for network in PAPER:
        yield from _of(network)


def _of(network: Network) -> Iterator[str]:
    for place, workers in enumerate(WORKERS):
        published = zip(SECONDS.items(), PAPER[network][place], strict=True)
        for (microbatches, seconds), figure in published:
            cells = [network.title, str(workers), str(microbatches), str(figure)]
            for options in ("", BETTER) if microbatches == SAMPLES else ("",):
                stages = scaled(network, workers, seconds * microbatches / SAMPLES, options)
                pairs = alone(stages, microbatches)
                unit = microbatches * sum(forward + both for forward, both in pairs)
                name = "interleaved-1f1b" if options else "gpipe"
                cells.append(f"{unit / step(stages, workers, microbatches, options):.2f}")
                cells.append(f"{unit / limit(pairs, workers, microbatches, name):.2f}")
            yield f"| {' | '.join([*cells, '', ''][:8])} |"


def scaled(network: Network, workers: int, seconds: float, options: str = "") -> Stages:
    """Return the stages of a network, so that a sample's forward takes so long in a worker."""
    stages = stages_of(network, workers, options)
    scale = seconds * workers / sum(forward for forward, _ in stages)
    return tuple((scale * forward, scale * backward) for forward, backward in stages)


def words_of(stages: Stages, samples: int = SAMPLES) -> tuple[object, ...]:
    """Return the arguments of the job of emulated accelerators."""
    return json.dumps(stages), len(stages), BYTES, samples


def step(
    stages: Stages, workers: int, microbatches: int, options: str = "", recompute: str = "always"
) -> float:
    """Return the median seconds of a step of a real run."""
    shape = workers, microbatches, SKIPPED_STEPS + 3, recompute
    return step_seconds(JOB, *shape, *words_of(stages), options=f"--balance even {options}")


def alone(stages: Stages, microbatches: int) -> list[tuple[float, float]]:
    """Return the seconds of a micro-batch in each stage, in one process: (forward, both)."""
    some = min(microbatches, 4)
    samples = SAMPLES * some // microbatches
    return plain(JOB, len(stages), some, *words_of(stages, samples))


def limit(
    pairs: Sequence[tuple[float, float]],
    workers: int,
    microbatches: int,
    name: str = "gpipe",
    recompute: str = "always",
) -> float:
    """Return the seconds of a step of a schedule if nothing but the layers took time."""
    order = replace(ORDERS[name], virtual_stages=len(pairs) // workers)
    placement = order.place(workers)
    schedule = order.build(placement, microbatches, [recompute] * placement.stages)
    forward = tuple(forward for forward, _ in pairs)
    backward = tuple(both - forward for forward, both in pairs)
    return simulate(schedule, Costs(forward, backward, backward)).makespan
