"""torchgpipe's tables of speed: U-Net and ResNet-101 by workers."""

from __future__ import annotations

from collections.abc import Iterator

from papers.networks import RESNET, SAMPLES, UNET
from papers.throughput import BETTER, alone, limit, scaled, step

TEXT = """\
Emulated accelerators, as in the table above. The unit is the speed of one process that keeps all
activations (torchgpipe's baseline). All recompute in `gpipe`, as there; `interleaved-1f1b` keeps
the activations, which a user does whose accelerators have the memory. 32 micro-batches of a sample;
torchgpipe chose mini-batches and micro-batches for each row. Its figures for AmoebaNet-D (18, 256)
beside GPipe's table 2, above, are 1.54 and 1.77 for K=2 and M=4, 32; 1.00, 1.67 and 2.71 for K=4;
and 0.93, 2.62 and 4.95 for K=8.
"""
WORKERS = (1, 2, 4, 8)
SECONDS = 0.010
"""The mean time of a micro-batch's forward on one accelerator."""
PAPER = {UNET: (0.858, 1.246, 2.352, 3.105), RESNET: (0.853, 1.414, 2.774, 4.294)}
"""The tables of 2004.09910: pipeline-1, 2, 4 and 8."""


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    ours = "ours, `gpipe` | its limit | `interleaved-1f1b` | its limit"
    yield f"| network | | torchgpipe | {ours} |"
    yield "|---|---|---|---|---|---|---|"
    for network, published in PAPER.items():
        for workers, figure in zip(WORKERS, published, strict=True):
            cells = [network.title, f"pipeline-{workers}", str(figure)]
            for options, mode in (("", "always"), (BETTER, "never")):
                if options and workers == 1:
                    continue  # one worker has nothing to interleave
                stages = scaled(network, workers, SECONDS, options)
                pairs = alone(stages, SAMPLES)
                unit = SAMPLES * sum(both for _, both in pairs)
                name = "interleaved-1f1b" if options else "gpipe"
                took = step(stages, workers, SAMPLES, options, mode)
                best = limit(pairs, workers, SAMPLES, name, mode)
                cells += [f"{unit / took:.2f}", f"{unit / best:.2f}"]
            yield f"| {' | '.join([*cells, '', ''][:7])} |"
