"""Other pipelines on any job file: torch.distributed.pipelining, DeepSpeed's, and torchgpipe.

torchrun --nproc-per-node WORKERS benchmarks/peer.py KIND JOB_FILE STEPS MICROBATCHES BALANCE …

BALANCE is the number of layers of each stage or, after ``even``, the number of equal stages; KIND
is a schedule of torch, ``deepspeed`` or, in one process, ``torchgpipe``. All keep the activations.
The first rank prints the median seconds of a step, and the peak memory in bytes of the process that
needs most, behind the first steps.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from launches import SKIPPED_STEPS, result
from parts import load_job
from torch import nn

from pipeworker.plan.partition import sizes

HERE = Path(__file__).resolve()
GPIPE = "ScheduleGPipe"
PLACED = {
    "ScheduleGPipe": "",
    "Schedule1F1B": "",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}
"""How a schedule of torch places two stages on a worker."""


class Measured(NamedTuple):
    """The median seconds of a step, and the bytes of the process that needs most memory."""

    seconds: float
    peak: int


def peer(
    kind: str,
    job_file: Path,
    balance: list[int] | int,
    microbatches: int,
    steps: int,
    *words: object,
) -> Measured:
    """Measure a peer with so many layers in each stage, or so many equal stages."""
    text = f"even{balance}" if isinstance(balance, int) else ",".join(map(str, balance))
    stages = balance if isinstance(balance, int) else len(balance)
    workers = stages // (2 if PLACED.get(kind) else 1)
    line = (kind, job_file, steps, microbatches, text)
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", workers)
    return Measured(*result(*(() if kind == "torchgpipe" else ranks), HERE, *line, *words))


class Pack(nn.Sequential):
    """Layers in turn; a stage gets the parts of a tuple as arguments."""

    def forward(self, *inputs: Any) -> Any:
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for layer in self:
            value = layer(value)
        return value


class Stage(Pack):
    """The layers of a stage of a job."""

    def __init__(self, job: Any, balance: list[int], index: int) -> None:
        first = sum(balance[:index])
        chosen = list(job.model())[first : first + balance[index]]
        super().__init__(*(e if isinstance(e, nn.Module) else e() for e in chosen))


def measure(step: Callable[[], object], steps: int) -> Measured:
    """Measure the later ones of some steps, in this process."""
    times = []
    for number in range(steps):
        if number == SKIPPED_STEPS:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return Measured(statistics.median(times[SKIPPED_STEPS:]), int(found[1]) * 1024)


def run_torch(kind: str, job: Any, steps: int, microbatches: int, balance: list[int]) -> Measured:
    """Run one rank of torch.distributed.pipelining."""
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    rank, world, count = dist.get_rank(), dist.get_world_size(), len(balance)
    held = {"": [rank], "loop": [rank, rank + world], "v": [rank, 2 * world - 1 - rank]}
    own = held[PLACED[kind]]
    nets = [Stage(job, balance, index) for index in own]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(net, index, count, device)
        for index, net in zip(own, nets, strict=True)
    ]
    schedule: Any = getattr(pipelining.schedules, kind)
    runs = schedule(stages if PLACED[kind] else stages[0], microbatches, loss_fn=job.loss)
    optimizer = job.optimizer([p for net in nets for p in net.parameters()])
    x, y = next(iter(job.data()))
    inputs = (x,) if 0 in own else ()
    targets = {"target": y, "losses": []} if count - 1 in own else {}

    def step() -> None:
        optimizer.zero_grad()
        runs.step(*inputs, **targets)
        optimizer.step()
        dist.barrier()

    return measure(step, steps)


def run_deepspeed(_: str, job: Any, steps: int, microbatches: int, balance: list[int]) -> Measured:
    """Run one rank of DeepSpeed's pipeline engine."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed("gloo")
    layers = [LayerSpec(Stage, job, balance, index) for index in range(len(balance))]
    net = PipelineModule(
        layers=layers, num_stages=len(balance), loss_fn=job.loss, partition_method="uniform"
    )
    x, y = next(iter(job.data()))
    config = {
        "train_batch_size": len(x),
        "train_micro_batch_size_per_gpu": len(x) // microbatches,
        "gradient_accumulation_steps": microbatches,
        "steps_per_print": 10_000,
    }
    engine, *_ = deepspeed.initialize(
        model=net, config=config, optimizer=job.optimizer(net.parameters())
    )

    def feed() -> Iterator[Any]:
        while True:
            yield from zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)

    batches = feed()
    return measure(lambda: engine.train_batch(batches), steps)


def run_torchgpipe(_: str, job: Any, steps: int, microbatches: int, balance: list[int]) -> Measured:
    """Run torchgpipe, whose stages are in one process, and on CPUs share one thread."""
    import torchgpipe

    made = [entry if isinstance(entry, nn.Module) else entry() for entry in job.model()]
    devices = [torch.device("cpu")] * len(balance)
    net = torchgpipe.GPipe(
        nn.Sequential(*made), balance, devices=devices, chunks=microbatches, checkpoint="never"
    )
    optimizer = job.optimizer(net.parameters())
    x, y = next(iter(job.data()))

    def step() -> None:
        optimizer.zero_grad()
        job.loss(net(x), y).backward()
        optimizer.step()

    return measure(step, steps)


def main() -> None:
    kind, job_file, steps, microbatches, balance, *words = sys.argv[1:]
    torch.set_num_threads(1)
    run = {"deepspeed": run_deepspeed, "torchgpipe": run_torchgpipe}.get(kind, run_torch)
    job = load_job(job_file, words)
    if balance.startswith("even"):
        layers = sizes(len(job.model()), int(balance.removeprefix("even")))
    else:
        layers = [int(count) for count in balance.split(",")]
    seconds, peak = run(kind, job, int(steps), int(microbatches), layers)
    rank = 0
    if dist.is_initialized():
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, peak)
        peak, rank = max(every), dist.get_rank()
    if rank == 0:
        print(json.dumps([seconds, peak]), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
