"""Whether pipelines compute what a plain loop does: gradients and weights after three steps.

Twelve small networks (`conformance_cases.py`) run through pipeworker, torch.distributed.pipelining
and, where it is installed, DeepSpeed's pipeline, with K = 1, 2 and 4. Each pipeline is used as its
documentation says for a loop with this network and loss. The optimizer is SGD without momentum, so
that a weight moves by the sum of its gradients. The reference is the loop over micro-batches in one
process, each weighted by its share of the mini-batch. A cell has the results over K: *equal*
to the bit; *close*, with the largest difference relative to the largest movement of a weight;
*wrong*, if that is above one in a thousand; *refused*, with an error; or *hangs*.

    python benchmarks/conformance.py [--only deepspeed torch pipeworker] [--markdown]
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from conformance_cases import CASES, MICROBATCHES, RATE, SAMPLES, STEPS, Case, optimizer
from peer import PLACED, Pack
from torch import nn

from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.rundir import find_checkpoint

Weights = dict[str, torch.Tensor]
JOB = Path(__file__).with_name("conformance_cases.py").resolve()
STAGES, PATIENCE, WRONG = (1, 2, 4), 40.0, 1e-3
OURS = ("gpipe", "zbv")
TORCH = [kind for kind in PLACED if kind != "ScheduleDualPipeV"]


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = ("pipeworker", "torch", "deepspeed")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    only, cases = parser.parse_args().only, parser.parse_args().cases
    torch.set_num_threads(1)
    columns: dict[str, Callable[[Case, str, int], Any]] = {}
    if "pipeworker" in only:
        columns |= {f"pipeworker `{name}`": _ours(name) for name in OURS}
    if "torch" in only:
        columns |= {f"torch `{name}`": _forked(run_torch, name) for name in TORCH}
    if "deepspeed" in only and importlib.util.find_spec("deepspeed"):
        importlib.import_module("deepspeed")  # forked processes have it then
        columns["DeepSpeed"] = _forked(run_deepspeed, "")
        # Its first process compiles an extension, on whose lock others wait.
        _forked(run_deepspeed, "", patience=300)(next(iter(CASES.values())), "", 1)
    print(f"| network | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    for name, case in CASES.items():
        if name not in cases:
            continue
        start, expected = plain(case, 0), plain(case, STEPS)
        cells = []
        for run in columns.values():
            results = [run(case, name, k) for k in STAGES]
            graded = (verdict(result, start, expected) for result in results)
            found = dict(zip(STAGES, graded, strict=True))
            text = summary(found)
            cells.append(text if text == "equal" else text + same(results))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def summary(found: dict[int, tuple[int, str]]) -> str:
    """Return the results by K: of each kind the worst, and for which K it is."""
    texts = []
    for grade in sorted({grade for grade, _ in found.values()}):
        some = {k: text for k, (own, text) in found.items() if own == grade}
        where = "" if len(some) == len(found) else f" (K={', '.join(map(str, some))})"
        texts.append(f"{max(some.values())}{where}")
    return "; ".join(texts)


def same(results: Sequence[Any]) -> str:
    """Return whether results have the same bits for every K, if they are not the plain loop's."""
    first, *others = results
    if any(isinstance(one, str) or one.keys() != first.keys() for one in results):
        return ""
    equal = all(torch.equal(one[name], first[name]) for one in others for name in first)
    return ", the same for every K" if equal else ""


def verdict(result: Any, start: Weights, expected: Weights) -> tuple[int, str]:
    """Return a grade, 0 for equal, and its text."""
    if isinstance(result, str):
        return 3, result
    if result.keys() != expected.keys():
        return 3, "refused"
    if all(torch.equal(result[name], tensor) for name, tensor in expected.items()):
        return 0, "equal"
    if not all(tensor.isfinite().all() for tensor in result.values()):
        return 2, "wrong, not finite"
    moved = max((tensor - start[name]).abs().max().item() for name, tensor in expected.items())
    off = max((result[name] - tensor).abs().max().item() for name, tensor in expected.items())
    off /= moved
    return (1, f"close, {off:.0e}") if off <= WRONG else (2, f"wrong, {off:.0%}")


def made(case: Case) -> list[nn.Module]:
    layers = [make() for make in case.layers]
    if case.tied:
        layers[-1].weight = layers[0].weight
    return layers


def state(layers: dict[int, nn.Module]) -> Weights:
    """Return parameters and buffers of floats, by the index of their layer and their name."""
    return {
        f"{index}.{name}": tensor.detach().clone()
        for index, layer in layers.items()
        for name, tensor in layer.state_dict().items()
        if tensor.is_floating_point()
    }


def plain(case: Case, steps: int) -> Weights:
    """Return the weights of a plain loop over micro-batches."""
    layers = made(case)
    net, numbers = nn.Sequential(*layers), iter(range(STEPS * case.accumulate))
    updates = optimizer([p for p in net.parameters() if p.requires_grad])
    for _ in range(steps):
        updates.zero_grad()
        for _ in range(case.accumulate):
            x, y = case.batch(next(numbers))
            every = len(x) if case.own_loss is None else int((y != -100).sum())
            for part, target in zip(
                x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True
            ):
                if case.own_loss is not None:  # the gradient of the sum, which is divided then
                    root, _ = case.own_loss(net(part), target)
                else:
                    share = len(part) / every / case.accumulate
                    root = case.loss(net(part), target) * share
                root.backward()
        if case.own_loss is not None:
            divide(net.parameters(), every)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        updates.step()
    return state(dict(enumerate(layers)))


def divide(parameters: Iterable[nn.Parameter], by: float) -> None:
    """Divide the gradients of parameters."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= by


def _ours(schedule: str) -> Callable[[Case, str, int], Any]:
    def run(case: Case, name: str, stages: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, "-m", "pipeworker", "launch", "--stages", str(stages)]
            line += ["--microbatches", str(MICROBATCHES), "--steps", str(STEPS), "--quiet"]
            line += ["--schedule", schedule, "--balance", "even", "--run-dir", f"{folder}/run"]
            line += [*case.options, str(JOB), "--", name]
            done = subprocess.run(line, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return "refused"
            weights = Checkpoint(find_checkpoint(Path(folder) / "run")).weights()
        return {name: w for name, w in weights.items() if w.is_floating_point()}

    return run


def _forked(
    part: Callable[..., Weights], kind: str, patience: float = PATIENCE
) -> Callable[[Case, str, int], Any]:
    """Return a run of a peer: a forked process for each rank, which may fail or hang."""

    def run(case: Case, name: str, stages: int) -> Any:
        with tempfile.TemporaryDirectory() as folder, closing(socket.socket()) as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
            found.close()
            pids = []
            for rank in range(stages):
                pids.append(os.fork())
                if not pids[-1]:
                    _child(part, (case, rank, stages, kind), Path(folder), port)
            ended = _wait(pids, patience)
            files = [Path(folder, str(rank)) for rank in range(stages)]
            if all(file.exists() for file in files):
                results = [pickle.loads(file.read_bytes()) for file in files]
                if errors := [one for one in results if isinstance(one, str)]:
                    print(f"{name}, {kind}, K={stages}: {errors[0]}", file=sys.stderr)
                    return "refused"
                return {name: tensor for one in results for name, tensor in one.items()}
        return "refused" if ended else "hangs"

    return run


def _child(part: Callable[..., Weights], words: Any, folder: Path, port: str) -> None:
    case, rank, stages, kind = words
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": stages, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        result: Any = part(case, rank, stages, kind)
    except BaseException as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    partial = folder / f"{rank}.part"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / str(rank))
    os._exit(0)


def _wait(pids: Sequence[int], patience: float) -> bool:
    """Wait for processes; return whether all have ended in time. The others are killed."""
    left, end = set(pids), time.monotonic() + patience
    while left and time.monotonic() < end:
        for pid in [*left]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.remove(pid)
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not left


def run_torch(case: Case, rank: int, world: int, kind: str) -> Weights:
    """Run one rank of torch.distributed.pipelining; return the weights of its stages."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    placed = PLACED[kind]
    count = 2 * world if placed else world
    held = [rank]
    if placed:
        held = [rank, rank + world] if placed == "loop" else [rank, 2 * world - 1 - rank]
    every, size = made(case), 8 // count
    # Stages are copies on their ranks, as they are where each builds its own.
    if not case.tied or world > 1:
        every = [copy.deepcopy(layer) for layer in every]
    own = {s: {i: every[i] for i in range(s * size, (s + 1) * size)} for s in held}
    nets = [Pack(*own[s].values()) for s in held]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(net, s, count, device) for s, net in zip(held, nets, strict=True)
    ]
    schedule: Any = getattr(pipelining.schedules, kind)
    runs = schedule(stages if placed else stages[0], MICROBATCHES, loss_fn=case.loss)
    every_one = (p for net in nets for p in net.parameters() if p.requires_grad)
    parameters = list(dict.fromkeys(every_one))  # a tied one is in two stages
    updates = optimizer(parameters or [torch.zeros(1, requires_grad=True)])
    numbers = iter(range(STEPS * case.accumulate))
    for _ in range(STEPS):
        updates.zero_grad()
        for _ in range(case.accumulate):
            x, y = case.batch(next(numbers))
            target = {"target": y, "losses": []} if count - 1 in held else {}
            runs.step(*((x,) if 0 in held else ()), **target)
        if case.accumulate > 1:
            divide(parameters, case.accumulate)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        updates.step()
    found = state({i: layer for s in held for i, layer in own[s].items()})
    dist.destroy_process_group()
    return found


def run_deepspeed(case: Case, rank: int, world: int, kind: str) -> Weights:
    """Run one rank of DeepSpeed's pipeline engine, which has one `kind`; return its weights."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    assert not kind
    deepspeed.init_distributed("gloo")
    layers: list[Any] = [LayerSpec(m.func, *m.args, **m.keywords) for m in case.layers]
    if case.tied:
        first = case.layers[0]
        layers[0] = TiedLayerSpec("words", first.func, *first.args)
        layers[-1] = TiedLayerSpec("words", first.func, *first.args, forward_fn=_logits)
    net = PipelineModule(
        layers=layers, num_stages=world, loss_fn=case.loss, partition_method="uniform"
    )
    samples = len(case.batch(0)[0])
    if samples % MICROBATCHES:
        raise ValueError("micro-batches have one size")
    total = MICROBATCHES * case.accumulate
    config: dict[str, Any] = {
        "train_batch_size": samples * case.accumulate,
        "train_micro_batch_size_per_gpu": samples // MICROBATCHES,
        "gradient_accumulation_steps": total,
        "steps_per_print": 10_000,
    }
    if case.clip is not None:
        config["gradient_clipping"] = case.clip
    parameters = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=net,
        config=config,
        optimizer=optimizer(parameters or [torch.zeros(1, requires_grad=True)]),
    )
    feed = _feed(case)
    for _ in range(STEPS):
        engine.train_batch(feed)
    found = dict(enumerate(net.forward_funcs, net._local_start))
    shared: Any = net.tied_modules["words"] if case.tied and len(net.tied_modules) else None
    return state({i: f if isinstance(f, nn.Module) else shared for i, f in found.items()})


def _logits(module: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, module.weight)


def _feed(case: Case) -> Iterator[Any]:
    """Yield micro-batches, as DeepSpeed reads them."""
    for number in range(STEPS * case.accumulate):
        x, y = case.batch(number)
        yield from zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True)


if __name__ == "__main__":
    assert RATE > 0
    assert SAMPLES % MICROBATCHES == 0
    main()
