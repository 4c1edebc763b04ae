"""The memory that the pods of a job need, by its plan."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from launcher.engines.pod import Settings
from launcher.spec import JobSpec
from pipeworker.errors import PipeworkerError, UsageError

_SPARE = 1.5
"""Times the planned memory: allocators, the network's buffers, and data that is read ahead."""
_OTHERS = 2 << 30
"""The bytes of torchrun's agent, the coordinator, and the processes that read data or write."""
_PLAN_SECONDS = 300.0
_OF_PLAN = frozenset(
    {
        *("--microbatches", "--schedule", "--virtual-stages", "--recompute", "--precision"),
        *("--balance", "--replicas", "--shard-optimizer", "--deferred-batch-norm", "--memory"),
    }
)


def planned_memory(spec: JobSpec, settings: Settings) -> str:
    """Return the memory of a pod, in whole Gi: what its workers need as planned, with a reserve.

    Raises:
        PipeworkerError: the job cannot be planned here.
    """
    if settings.job:
        raise UsageError("its job file is in the pods, and cannot be planned here")
    words = ["--stages", str(spec.stages), "--no-profile", "--json"]
    for option, value in pairwise((*spec.options, "")):
        if option in _OF_PLAN:
            words += [option] if value.startswith("--") or not value else [option, value]
    line = [sys.executable, "-m", "pipeworker", "plan", *words, spec.job_file]
    line += ["--", *spec.arguments] if spec.arguments else []
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=_PLAN_SECONDS, cwd=Path(spec.folder)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PipeworkerError(f"its plan failed: {error}") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0].removeprefix("error: ")
        raise PipeworkerError(f"its plan failed: {reason}")
    needed = max(int(stage["memory_bytes"]) for stage in json.loads(done.stdout)["stages"])
    pod = int(_SPARE * needed * spec.workers_per_node) + _OTHERS
    return f"{-(-pod // 2**30)}Gi"
