"""On accelerators: the same promises, where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch

from support.compare import assert_same
from support.jobs import Jobs
from support.sources import DROPOUT_JOB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this host"),
]


def test_stages_on_accelerators_give_the_same_bits(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--device", "cuda")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    assert base.plan["stages"][0]["device"].startswith("cuda")
    for stages in ("2", "4"):
        for mode in ("always", "never"):
            more = ("--stages", stages, "--recompute", mode)
            assert_same(base, jobs.train(*more, *words, source=DROPOUT_JOB))
