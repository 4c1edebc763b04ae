"""Options from what a command line or a script specified, and options as text again."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.job.options import Options, default_microbatches
from pipeworker.job.renamed import hyphened, written
from pipeworker.plan import text
from pipeworker.plan.orders import resolve
from pipeworker.plan.partition import parse_balance

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([kmgt]i?b|b|)", re.ASCII | re.IGNORECASE)
_THREADS = re.compile(r"0{0,9}[1-9]\d{0,8}", re.ASCII)
UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
"""The bytes of a unit of memory or files, in lower case."""
_LARGEST = 1 << 62


def make_options(job_file: str, stages: int, given: Mapping[str, Any]) -> Options:
    """Return the options of a job; those that `given` lacks, or has as None, have defaults."""
    # A float of NumPy's is a float, but msgspec wants Python's own.
    chosen: dict[str, Any] = {
        name: float(value) if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }
    balance = chosen.get("balance")
    if isinstance(balance, (list, tuple)):
        balance = ",".join(map(repr, balance))
    if isinstance(balance, str):
        chosen["balance"] = parse_balance(balance)
    memory = chosen.get("memory")
    if isinstance(memory, (list, tuple)):
        memory = ",".join(map(str, memory))
    if isinstance(memory, (str, int, float)):
        chosen["memory"] = parse_memory(str(memory))
    if type(chosen.get("checkpoint_every")) is int:
        chosen["checkpoint_every"] = str(chosen["checkpoint_every"])
    every = chosen.get("evaluate_every")
    if isinstance(every, str) and every.isascii() and every.isdigit():
        with suppress(ValueError):  # Python reads no more than some thousand digits
            chosen["evaluate_every"] = int(every)
    if isinstance(chosen.get("init_from"), (str, Path)):
        chosen["init_from"] = str(Path(chosen["init_from"]).absolute())
    replicas = chosen.get("replicas", 1)
    copies = max(1, replicas) if type(replicas) is int else 1  # Options refuses other values
    microbatches = default_microbatches(stages, copies)
    schedule = chosen.get("schedule")
    if isinstance(schedule, str) and text.is_text(schedule):
        microbatches = (resolve(schedule).microbatches or 0) * copies
    chosen.setdefault("microbatches", microbatches)
    if "threads" not in chosen:
        threads = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0].strip()  # of the first level
        chosen["threads"] = int(threads) if _THREADS.fullmatch(threads) else 1
    return Options.of({**chosen, "job_file": job_file, "stages": stages})


def parse_memory(text: str) -> tuple[int, ...]:
    """Read sizes of memory, as ``16GB`` or ``16GB,8GiB``, in bytes.

    Raises:
        UsageError: it is something else.
    """
    sizes = []
    for part in text.split(","):
        found = _SIZE.fullmatch(part.strip())
        size = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
        if not 1 <= size < _LARGEST:
            raise UsageError(
                f"--memory {text}: not a size of memory; write one as 16GB or 900MiB, or one for "
                "each worker, as 16GB,8GB"
            )
        sizes.append(int(size))
    return tuple(sizes)


def format_option(name: str, value: Any) -> str:
    """Return an option as a command line writes it."""
    if value is None or (value is False and name.startswith("no_")):  # which has no other form
        return f"{written(name)} (by default)"
    if name == "schedule":
        value = text.name_of(str(value))
    if isinstance(value, bool):
        return written(name) if value else f"--no-{hyphened(name)}"
    if isinstance(value, (list, tuple)):
        value = shlex.join(map(str, value)) if name == "arguments" else ",".join(map(str, value))
    if name == "arguments":
        return f"-- {value}"
    return f"{written(name)} {shlex.quote(str(value))}"


def format_by_origin(origins: Mapping[str, str], options: Mapping[str, Any]) -> list[str]:
    """Return the options that were not typed, a line per source: ``PIPEWORKER_SEED: --seed 3``."""
    by_source: dict[str, list[str]] = {}
    for name, source in origins.items():
        by_source.setdefault(source, []).append(format_option(name, options.get(name)))
    return [f"{source}: {' '.join(options)}" for source, options in by_source.items()]


def workers_per_replica(ranks: int, replicas: int) -> int:
    """Return the workers of each replica in a job of `ranks` processes."""
    if not 1 <= replicas <= ranks or ranks % replicas:
        raise UsageError(
            f"--replicas {replicas}: must divide the number of processes, {ranks}, because each "
            "process is a stage of a replica"
        )
    return ranks // replicas
