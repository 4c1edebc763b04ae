"""The bound of a step of any job file: each of its stages by itself, in a separate process.

python benchmarks/parts.py JOB_FILE STAGES MICROBATCHES ARGUMENTS...
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from launches import result

from pipeworker.plan.partition import block

HERE = Path(__file__).resolve()


def plain(
    job_file: Path, stages: int, microbatches: int, *words: object
) -> list[tuple[float, float]]:
    """Return each stage's seconds for a micro-batch in one process: (forward, both)."""
    found = result(HERE, job_file, stages, microbatches, *words)
    return [(forward, both) for forward, both in found]


def load_job(job_file: str, words: list[str]) -> Any:
    """Import a job file as if it were called with these words, from its own folder."""
    sys.argv = [job_file, *words]
    sys.path.insert(0, str(Path(job_file).resolve().parent))
    spec = importlib.util.spec_from_file_location("job", job_file)
    assert spec is not None
    assert spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = job  # so that its import of pipeworker is seen
    spec.loader.exec_module(job)
    return job


def _stage(job: Any, stage: int, stages: int) -> Any:
    """Build the layers of a stage, by the even balance of `pipeworker launch`."""
    from torch import nn

    entries = list(job.model())
    chosen = [entries[index] for index in block(len(entries), stages, stage)]
    return nn.Sequential(*(e if isinstance(e, nn.Module) else e() for e in chosen))


def run_plain(job: Any, stages: int, microbatches: int) -> None:
    """Time each stage by itself: all micro-batches forward, then all backward."""
    import torch

    torch.set_num_threads(1)
    x, y = next(iter(job.data()))
    values = list(x.tensor_split(microbatches))
    targets = list(y.tensor_split(microbatches))
    found = []
    for index in range(stages):
        net = _stage(job, index, stages)
        times = []
        for _ in range(4):
            inputs = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
            start = time.perf_counter()
            outputs = [net(value) for value in inputs]
            middle = time.perf_counter()
            pairs: list[tuple[Any, Any]]
            if index == stages - 1:
                pairs = [(job.loss(o, t), None) for o, t in zip(outputs, targets, strict=True)]
            else:
                pairs = [(o, torch.ones_like(o)) for o in outputs]
            for output, gradient in pairs:
                output.backward(gradient)
            end = time.perf_counter()
            times.append(((middle - start) / len(values), (end - start) / len(values)))
        values = [output.detach() for output in outputs]
        found.append([statistics.median(t[i] for t in times[1:]) for i in (0, 1)])
    print(json.dumps(found))


if __name__ == "__main__":
    job_file, count, microbatches, *words = sys.argv[1:]
    run_plain(load_job(job_file, words), int(count), int(microbatches))
