"""torchgpipe's table of memory: U-Net by workers, planned without memory for it."""

from __future__ import annotations

from collections.abc import Iterator

from launches import planned

from papers.networks import EXAMPLES

TEXT = """\
`pipeworker plan --no-profile` makes these networks on the meta device, and says what each worker
would need: weights, gradients, the states of AdamW, activations of 32 samples of 192 x 192 points
in 32 micro-batches (one of the baseline, which keeps its activations), and two copies of weights
and states for recovery. torchgpipe measured the sum over P40 GPUs, for mini-batches that it chose
for each row, with SGD: the last column is ours without AdamW's states and the copies, 32 bytes a
parameter.
"""
ROWS = (
    ("baseline", 1, 6, 72, 362.2, 20.3),
    ("pipeline-1", 1, 11, 128, 2210, 20.5),
    ("pipeline-2", 2, 24, 128, 4990, 43.4),
    ("pipeline-4", 4, 24, 160, 7800, 79.1),
    ("pipeline-8", 8, 48, 160, 15820, 154.1),
)
"""The table of 2004.09910: workers, B, C, parameters in millions, and GiB of all devices."""
ADAMW = 4 * (2 + 2 * 3)
"""Bytes of a parameter: two states, and two copies of those and the weight."""


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    yield "| | (B, C) | parameters | torchgpipe, GiB | ours, GiB | ours with SGD, GiB |"
    yield "|---|---|---|---|---|---|"
    for name, workers, blocks, channels, published, gib in ROWS:
        mode, microbatches = ("never", 1) if name == "baseline" else ("always", 32)
        options = f"--stages {workers} --microbatches {microbatches} --recompute {mode}"
        words = f"--blocks {blocks} --channels {channels} --side 192 --noise".split()
        options += " --no-profile --memory 1TB"
        stages = planned(EXAMPLES / "unet.py", options, *words)["stages"]
        needed = sum(stage["memory_bytes"] for stage in stages)
        count = sum(stage["parameters"] for stage in stages)
        assert abs(count / 1e6 / published - 1) < 0.01
        cells = [name, f"({blocks}, {channels})", f"{count / 1e6:.1f}M", str(gib)]
        cells += [f"{each / 2**30:.1f}" for each in (needed, needed - ADAMW * count)]
        yield f"| {' | '.join(cells)} |"
