"""The gain and cost of ``--compile``, and whether its bits depend on the number of stages.

The layers are transformer blocks, as in ``transformer.py``. Each number of stages runs with and
without ``--compile``. Each run has its own cache of kernels, which its workers share. A wrapper of
the compiler records each compilation.

    python benchmarks/compiled.py [--stages 1,2,4] [--microbatches 8] [--steps 8]
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from launches import launched

from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.rundir import find_checkpoint

JOB = Path(__file__).with_name("transformer_job.py")
COMPILER = "c++"
NOTES = """#!/bin/sh
echo "$@" >> {0}
exec {1} "$@"
"""


Trained = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
"""The rows of a run, and its last weights."""


def train(stages: int, microbatches: int, steps: int, options: str = "") -> Trained:
    shape = f"--stages {stages} --microbatches {microbatches} --steps {steps}"
    with launched(JOB, f"{shape} {options}", microbatches) as run:
        return run.rows, Checkpoint(find_checkpoint(run.path)).weights()


def record_compiler(folder: Path) -> Path:
    """Set an empty cache and a compiler that records; return the file of its records."""
    notes, compiler = folder / "notes", folder / "compiler"
    folder.mkdir()
    notes.touch()
    compiler.write_text(NOTES.format(shlex.quote(str(notes)), COMPILER))
    compiler.chmod(0o755)
    os.environ.update(CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
    return notes


def kernels(notes: Path) -> tuple[int, int]:
    """Return the number of compiled kernels, and of different ones."""
    outputs = [
        words[words.index("-o") + 1]
        for words in map(shlex.split, notes.read_text().splitlines())
        if "-o" in words and any(word.endswith(".cpp") for word in words)
    ]
    return len(outputs), len(set(outputs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    first: tuple[list[float], dict[str, torch.Tensor]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for stages in map(int, args.stages.split(",")):
            asked = stages, args.microbatches, args.steps
            plain, _ = train(*asked)
            notes = record_compiler(Path(folder, f"kernels-{stages}"))
            found, weights = train(*asked, "--compile")
            compiled, different = kernels(notes)
            result = [row["loss"] for row in found], weights
            first = first or result
            equal = result[0] == first[0] and all(
                torch.equal(tensor, first[1][name]) for name, tensor in result[1].items()
            )
            steps = [
                statistics.median(row["seconds"] for row in some[2:]) for some in (plain, found)
            ]
            print(
                f"K={stages}: {steps[0] * 1e3:.0f} ms a step, compiled {steps[1] * 1e3:.0f} ms "
                f"({steps[0] / steps[1]:.2f} times as fast) after a first one of "
                f"{found[0]['seconds']:.1f} s; bits {'as the first' if equal else 'DIFFER'}; "
                f"{compiled} kernels compiled, {different} different ones",
                flush=True,
            )


if __name__ == "__main__":
    main()
