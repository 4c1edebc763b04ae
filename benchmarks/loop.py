"""The usual training loop over micro-batches of any job file, in one process.

python benchmarks/loop.py JOB_FILE STEPS MICROBATCHES DEVICE PRECISION ARGUMENTS...

It prints the median seconds of a step, the last loss, and the peak bytes: of the device, or of the
process on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from launches import SKIPPED_STEPS, result
from parts import load_job
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def loop(
    job: Path,
    steps: int,
    microbatches: int,
    device: str,
    precision: str,
    *words: object,
    timeout: float = 600,
) -> tuple[float, float, int]:
    """Return the median seconds of a step, the last loss, and the peak bytes of the loop."""
    line = (Path(__file__).resolve(), job, steps, microbatches, device, precision, *words)
    seconds, loss, peak = result(*line, timeout=timeout)
    return seconds, loss, peak


def main() -> None:
    job_file, steps, microbatches, device, precision, *words = sys.argv[1:]
    job, dtype = load_job(job_file, words), DTYPES.get(precision)
    torch.manual_seed(0)
    made = job.model()
    net = made if isinstance(made, nn.Module) else nn.Sequential(*(entry() for entry in made))
    net.to(device).train()
    optimizer = job.optimizer(net.parameters())
    took, value = [], 0.0
    for _, (inputs, target) in zip(range(int(steps)), job.data(), strict=False):
        began = time.perf_counter()
        losses: list[torch.Tensor] = []
        named = inputs if isinstance(inputs, dict) else {"input": inputs}  # as nn.Sequential has it
        parts = [one.to(device).tensor_split(int(microbatches)) for one in named.values()]
        for *values, ym in zip(
            *parts, target.to(device).tensor_split(int(microbatches)), strict=True
        ):
            with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
                output: Any = net(**dict(zip(named, values, strict=True)))
                loss = job.loss(output, ym) * (len(ym) / len(target))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        value = torch.stack(losses).sum().item()
        took.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps([statistics.median(took[SKIPPED_STEPS:]), value, peak]))


if __name__ == "__main__":
    main()
