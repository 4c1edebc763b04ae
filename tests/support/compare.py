"""Comparisons of two runs, and the plain loop as the reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from support.jobs import Run


def plain_loop(
    job_file: Path, *, microbatches: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Run the documented plain loop; return losses, weights and optimizer state."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("plain_job", job_file)
    assert spec is not None
    assert spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    torch.manual_seed(0)
    net = job.model()
    opt = job.optimizer(net.parameters())
    losses = []
    for _, (x, y) in zip(range(steps), job.data(), strict=False):
        opt.zero_grad()
        total = 0.0
        count = min(microbatches, _size(x))
        for xm, ym in zip(_split(x, count), _split(y, count), strict=True):
            scaled = job.loss(net(xm), ym) * (_size(xm) / _size(x))
            scaled.backward()
            total += scaled.item()
        opt.step()
        losses.append(total)
    state = [opt.state[p] for p in net.parameters()]
    return losses, net.state_dict(), state


def _size(value: Any) -> int:
    while isinstance(value, dict):
        value = next(iter(value.values()))
    return len(value)


def _split(value: Any, count: int) -> list[Any]:
    if isinstance(value, dict):
        pieces = {key: _split(item, count) for key, item in value.items()}
        return [{key: pieces[key][m] for key in value} for m in range(count)]
    return list(value.tensor_split(count))


def assert_same(left: Run, right: Run) -> None:
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
