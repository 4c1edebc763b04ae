"""Options from what a command line or a script gave, and from the environment."""

from __future__ import annotations

import os
import shlex
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.job.options import RIVALS, Options
from pipeworker.plan.partition import parse_balance

_MICROBATCHES_PER_STAGE = 4  # GPipe: the bubble is small from M >= 4 K on


def complete(job_file: str, stages: int, given: Mapping[str, Any]) -> Options:
    """Options with what was given; what is not there, or None, is the default.

    Raises:
        UsageError: a value is of the wrong type or out of range.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    balance = chosen.get("balance")
    if isinstance(balance, (list, tuple)):
        balance = ",".join(map(repr, balance))
    if isinstance(balance, str):
        chosen["balance"] = parse_balance(balance)
    if type(chosen.get("checkpoint_every")) is int:
        chosen["checkpoint_every"] = str(chosen["checkpoint_every"])
    every = chosen.get("evaluate_every")
    if isinstance(every, str) and every.isascii() and every.isdigit():
        chosen["evaluate_every"] = int(every)
    if isinstance(chosen.get("init_from"), (str, Path)):
        chosen["init_from"] = str(Path(chosen["init_from"]).absolute())
    hints = typing.get_type_hints(Options)
    for name, value in chosen.items():
        if not _is(value, hints[name]):
            raise UsageError(f"--{name.replace('_', '-')} {value!r}: a {type(value).__name__}")
    replicas = max(1, chosen.get("replicas", 1))  # what is less is said to be wrong below
    chosen.setdefault("microbatches", _MICROBATCHES_PER_STAGE * stages * replicas)
    if "threads" not in chosen:
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        chosen["threads"] = int(threads) if threads.isdigit() and int(threads) else 1
    return Options(job_file=job_file, stages=stages, **chosen)


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Options as one source gives them, but for what another gives that counts more."""
    said = {name: value for name, value in above.items() if value is not None}
    beaten = {RIVALS.get(name) for name in said}
    return {**{name: value for name, value in below.items() if name not in beaten}, **said}


def as_typed(name: str, value: Any) -> str:
    """An option as a command line says it."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    if isinstance(value, (list, tuple)):
        value = shlex.join(map(str, value)) if name == "arguments" else ",".join(map(str, value))
    if name == "arguments":
        return f"-- {value}"
    return f"--{option} {'(by default)' if value is None else shlex.quote(str(value))}"


def by_origin(origins: Mapping[str, str], options: Mapping[str, Any]) -> list[str]:
    """Options that nobody typed, a line for each place that says some: ``PIPEWORKER_SEED: ...``."""
    places: dict[str, list[str]] = {}
    for name, place in origins.items():
        places.setdefault(place, []).append(as_typed(name, options.get(name)))
    return [f"{place}: {' '.join(options)}" for place, options in places.items()]


def stages_of(ranks: int, replicas: int) -> int:
    """The stages of a job of so many processes.

    Raises:
        UsageError: they cannot be divided among the replicas.
    """
    if not 1 <= replicas <= ranks or ranks % replicas:
        raise UsageError(
            f"--replicas {replicas}: there are {ranks} processes, a stage of a replica in each, "
            "which must be a multiple of it"
        )
    return ranks // replicas


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of the type that an option is declared to be; whole numbers are floats."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(_is(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        of = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_is(item, of) for item in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (float, int) if kind is float else kind)
