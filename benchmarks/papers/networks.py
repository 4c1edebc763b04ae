"""The real networks of the tables, and what their layers cost on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launches import planned

EXAMPLES = Path(__file__).parents[2] / "examples" / "papers"
SAMPLES = 32
"""Samples of a mini-batch: one for each of GPipe's 32 micro-batches."""


@dataclass(frozen=True)
class Network:
    """A network of a paper: its job file in ``examples/papers``, and arguments."""

    title: str
    file: str
    words: str


TRANSFORMER = Network(
    "Transformer-48",
    "transformer.py",
    "--layers 48 --width 2048 --inner 8192 --heads 32 --words 32000 --context 1024",
)
AMOEBANET = Network(
    "AmoebaNet-D (18, 256)",
    "amoebanet.py",
    "--cells 18 --filters 256 --side 224 --classes 1000 --noise",
)
UNET = Network("U-Net (5, 64)", "unet.py", "--blocks 5 --channels 64 --side 192 --noise")
RESNET = Network(
    "ResNet-101", "resnet101.py", "--depth 101 --channels 64 --side 224 --classes 1000 --noise"
)

Stages = tuple[tuple[float, float], ...]
"""The seconds of a sample's forward and backward, without recompute, in each stage."""


@cache
def stages_of(network: Network, workers: int, options: str) -> Stages:
    """Return the stages that `plan` divides a network into, with further options.

    The first call measures the layers of the network.
    """
    shape = f"--stages {workers} --microbatches {SAMPLES} --recompute always --memory 1TB"
    words = (*network.words.split(), "--batch", SAMPLES)
    plan = planned(EXAMPLES / network.file, f"{shape} {options}", *words)
    seconds = [stage["seconds"] for stage in plan["stages"]]
    return tuple((one["forward"] / SAMPLES, one["backward"] / SAMPLES) for one in seconds)
