"""The parts that benchmarks run in separate processes, for any job file: pipeworker, and the bound.

python benchmarks/parts.py plain JOB_FILE STAGES MICROBATCHES ARGUMENTS...
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SKIPPED_STEPS = 3


def python(*words: str, timeout: float = 300, core: int | None = None) -> str:
    """Run a Python program, on one core if `core` is given; return the last line of its output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    line = [*pinned, sys.executable, *words]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def plain(job_file: Path, stages: int, microbatches: int, *words: str) -> list[tuple[float, float]]:
    """Return each stage's seconds for a micro-batch in one process: (forward, both)."""
    output = python(str(HERE), "plain", str(job_file), str(stages), str(microbatches), *words)
    return [(forward, both) for forward, both in json.loads(output)]


def pipeworker_step(
    job_file: Path,
    stages: int,
    microbatches: int,
    steps: int,
    recompute: str,
    *words: str,
    options: tuple[str, ...] = (),
    look: Callable[[Path], object] = lambda _: None,
) -> float:
    """Return the median seconds of a step of `pipeworker launch`, with further `options`.

    `look` is called with the run directory before it is removed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        line = ["-m", "pipeworker", "launch", "--stages", str(stages), "--steps", str(steps)]
        line += ["--microbatches", str(microbatches), "--recompute", recompute, *options]
        python(*line, "--run-dir", str(run_dir), str(job_file), "--", *words)
        rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").open()]
        look(run_dir)
    return float(statistics.median(row["seconds"] for row in rows[SKIPPED_STEPS:]))


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
    share, extra = divmod(len(entries), stages)
    first = stage * share + min(stage, extra)
    chosen = entries[first : first + share + (stage < extra)]
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
    _, job_file, count, microbatches, *words = sys.argv[1:]
    run_plain(load_job(job_file, words), int(count), int(microbatches))
