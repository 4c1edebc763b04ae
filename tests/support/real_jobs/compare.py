"""Comparisons of two runs, and the plain loop as the reference."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeworker.record.checkpoint.checkpoint import Checkpoint, read_plain
from pipeworker.record.checkpoint.json_state import unpack
from pipeworker.record.checkpoint.tensor_file import TensorFile
from support.in_process.plain_loop import in_a_list, split
from support.real_jobs.jobs import Record

_MEASURED = {"seconds", "samples_per_second", "bubble"}
"""The fields of a row that are measured."""


def plain_loop(
    job_file: Path, *, microbatches: int, steps: int, device: str = "cpu"
) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Run the documented plain loop; return losses, weights and optimizer state, on the CPU.

    Schedulers are stepped if the job has several optimizers.
    """
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("plain_job", job_file)
    assert spec is not None
    assert spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    torch.manual_seed(0)
    net = job.model().to(device)
    optimizers = in_a_list(job.optimizer(list(net.parameters())))
    schedulers = job.scheduler(optimizers) if len(optimizers) > 1 else []
    losses = []
    for _, (x, y) in zip(range(steps), job.data(), strict=False):
        net.zero_grad()
        total = 0.0
        samples = len(tree_leaves(x)[0])
        count = min(microbatches, samples)
        x, y = (tree_map_only(torch.Tensor, lambda t: t.to(device), one) for one in (x, y))
        for xm, ym in zip(split(x, count), split(y, count), strict=True):
            scaled = job.loss(net(xm), ym) * (len(tree_leaves(xm)[0]) / samples)
            scaled.backward()
            total += scaled.item()
        for one in (*optimizers, *schedulers):
            one.step()
        losses.append(total)
    state = [opt.state[p] for p in net.parameters() for opt in optimizers if p in opt.state]
    return losses, net.cpu().state_dict(), state


def assert_same(left: Record, right: Record) -> None:
    """Compare losses, norms, weights and optimizer state without tolerance."""
    for name in ("loss", "grad_norm", "lr", "epoch"):
        assert [r[name] for r in left.metrics] == [r[name] for r in right.metrics], name
    assert left.weights.keys() == right.weights.keys()
    for key, value in left.weights.items():
        assert torch.equal(value, right.weights[key]), key
    assert left.optimizer_state.keys() == right.optimizer_state.keys()
    for key, state in left.optimizer_state.items():
        for name, value in state.items():
            other = right.optimizer_state[key][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (key, name)


def rows(run: Record, name: str, skip: Collection[str] = ()) -> dict[int, str]:
    """Return the rows of ``metrics.jsonl`` or ``evaluation.jsonl`` by step, without times."""
    path = run.path / f"{name}.jsonl"
    found = [json.loads(line) for line in path.open()] if path.exists() else []
    steps = [row["step"] for row in found]
    assert steps == sorted({*steps}), steps
    omitted = {*_MEASURED, *skip}
    return {
        row["step"]: json.dumps({k: v for k, v in row.items() if k not in omitted}) for row in found
    }


def full_state(path: Path) -> dict[str, Any]:
    """Return all that a checkpoint holds, under names that no layout of the job changes."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    found: dict[str, Any] = {f"weight {k}": v for k, v in checkpoint.weights().items()}
    found["scaler"], found["evaluation"] = (
        checkpoint.manifest.scaler,
        checkpoint.manifest.evaluation,
    )
    for files in checkpoint.worker_files():
        tensors, plain = TensorFile(files.optimizer), read_plain(files.state)
        for kind in ("buffers", "extra"):
            for name, value in plain[kind].items():
                found[f"{kind} {name}"] = unpack(value, tensors)
        for update in plain["updates"]:
            for name, value in update["state"].items():
                found[f"state {name}"] = unpack(value, tensors)
            for index, group in enumerate(update["groups"]):
                values = {k: unpack(v, tensors) for k, v in group.items() if k != "params"}
                values["scheduler"] = _of_group(unpack(update.get("scheduler"), tensors), index)
                found |= {f"group {name}": values for name in group["params"]}
        if "data" in plain:
            found["data"] = unpack(plain["data"], tensors)
    return found


def _of_group(state: Any, index: int) -> Any:
    """Return a scheduler's state for one group of the optimizer: it has lists by group."""
    if isinstance(state, list):
        return [_of_group(one, index) for one in state]
    if not isinstance(state, dict):
        return state
    by_group = {name for name in state if name.endswith(("lrs", "last_lr", "lambdas"))}
    return {k: v[index] if k in by_group else _of_group(v, index) for k, v in state.items()}


def differences(left: Any, right: Any, name: str = "") -> list[str]:
    """Return the names of the values that differ, bit for bit, between two nested values."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        shapes = (left.dtype, left.shape) == (right.dtype, right.shape)
        same = shapes and _bits(left).equal(_bits(right))
        return [] if same else [f"{name}: {left} and {right}"]
    if type(left) is type(right) and isinstance(left, dict):
        missing = [f"{name} {key}: only in one" for key in left.keys() ^ right.keys()]
        both = (differences(left[k], right[k], f"{name} {k}") for k in left.keys() & right.keys())
        return sorted([*missing, *(one for some in both for one in some)])
    if type(left) is type(right) and isinstance(left, list | tuple) and len(left) == len(right):
        each = (
            differences(a, b, f"{name} {i}")
            for i, (a, b) in enumerate(zip(left, right, strict=True))
        )
        return [one for some in each for one in some]
    return [] if repr(left) == repr(right) else [f"{name}: {left!r} and {right!r}"]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_identical(run: Record, quiet: Record, skip: Collection[str] = ()) -> None:
    """Compare all rows and all state at the end, bit for bit.

    Args:
        run: a run, whose first rows another run may have.
        quiet: a whole run.
        skip: fields of rows and parts of the state that are not compared.
    """
    for name in ("metrics", "evaluation"):
        found, expected = rows(run, name, skip), rows(quiet, name, skip)
        first = min(found, default=0) if name == "metrics" else 0
        found_differences = differences(
            found, {step: row for step, row in expected.items() if step >= first}, name
        )
        assert not found_differences, "\n".join(found_differences[:20])
    states = (full_state(one.checkpoint.path) for one in (run, quiet))
    left, right = ({k: v for k, v in state.items() if k not in skip} for state in states)
    found_differences = differences(left, right)
    assert not found_differences, "\n".join(found_differences[:20])
