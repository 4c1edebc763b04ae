"""The example with tokenized texts of any length: equal bits when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.rundir import find_checkpoint
from support.real_jobs.jobs import Jobs

pytest.importorskip("tokenizers")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "packedlm.py")
SMALL = ("--files", "a*.py", "--width", "16", "--heads", "2", "--blocks", "2", "--context", "64")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return Checkpoint(find_checkpoint(run)).weights()


def test_texts_are_packed_and_read_again_in_the_same_order(jobs: Jobs, tmp_path: Path) -> None:
    found = []
    for stages, parts in (("1", ["6"]), ("3", ["2", "6"])):
        run = tmp_path / f"run-{stages}"
        for number, steps in enumerate(parts):
            again = ["--resume"] if number else []
            done = jobs.pipeworker(
                *("launch", "--stages", stages, "--steps", steps, "--microbatches", "2", *again),
                *("--run-dir", str(run), EXAMPLE, "--", *SMALL),
            )
            assert done.returncode == 0, done.stderr
        found.append(weights(run))
    one, resumed = found
    assert one.keys() == resumed.keys()
    for name, tensor in one.items():
        assert torch.equal(resumed[name], tensor), name
