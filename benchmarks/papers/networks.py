"""The real networks of the tables, and what their layers cost on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
    "ResNet-101",
    "resnet101.py",
    "--depth 101 --channels 64 --side 224 --classes 1000 --noise",
)


@dataclass(frozen=True)
class Stages:
    """The stages that the plan divides a network into.

    Attributes:
        balance: layers of each.
        seconds: of a sample's forward and of its backward, without recompute, in each.
    """

    balance: tuple[int, ...]
    seconds: tuple[tuple[float, float], ...]

    @property
    def total(self) -> float:
        """The seconds of a sample in all stages, with a recompute."""
        return sum(2 * forward + backward for forward, backward in self.seconds)

    def scaled(self, factor: float) -> Stages:
        """Return the same on accelerators that take `factor` times as long."""
        seconds = tuple((factor * f, factor * b) for f, b in self.seconds)
        return Stages(self.balance, seconds)


@cache
def stages_of(network: Network, workers: int, *options: str) -> Stages:
    """Return the stages of a network on so many workers, with further options of `plan`.

    The first call measures the layers of the network.
    """
    words = ["--stages", str(workers), "--microbatches", str(SAMPLES), "--recompute", "always"]
    words += ["--memory", "1TB", "--json", *options, str(EXAMPLES / network.file), "--"]
    plan = pipeworker("plan", *words, *network.words.split(), "--batch", str(SAMPLES))
    found = sorted(json.loads(plan)["stages"], key=lambda stage: stage["stage"])
    return Stages(
        tuple(stage["layers"][1] - stage["layers"][0] for stage in found),
        tuple(
            (s["seconds"]["forward"] / SAMPLES, s["seconds"]["backward"] / SAMPLES) for s in found
        ),
    )


def pipeworker(*words: str, **variables: str) -> str:
    """Run a command; return its output."""
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
    line: list[Any] = [sys.executable, "-m", "pipeworker", *words]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
