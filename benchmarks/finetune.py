"""Fine-tuning of a language model of transformers: stages on one GPU, and the usual loop on it.

Both train the same model on the same mini-batches in the same precision, in turn; the loop is that
of transformers' documentation, with accumulation of gradients over the micro-batches. By default
the model has 1.2 billion parameters. Prints seconds of a step, tokens a second, and the peak memory
of the GPU that all processes together allocate.

    python benchmarks/finetune.py [--stages 2] [--steps 100] [--precision bf16]
    python benchmarks/finetune.py --device cpu --width 128 --layers 4 --length 32 --steps 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from parts import SKIPPED_STEPS, load_job, python

HERE = Path(__file__).resolve()
JOB = HERE.with_name("finetune_job.py")
BATCH = 16  # samples of a mini-batch, as in finetune_job.py
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain(steps: int, microbatches: int, device: str, precision: str, words: list[str]) -> None:
    """Run the usual loop; print the median seconds of a step, the last loss, and the peak bytes."""
    job: Any = load_job(str(JOB), words)
    torch.manual_seed(0)
    net = job.model().to(device)
    net.train()
    optimizer = job.optimizer(net.parameters())
    times, value = [], 0.0
    for _, (inputs, target) in zip(range(steps), job.data(), strict=False):
        began = time.perf_counter()
        losses = []
        ids, target = inputs["input_ids"].to(device), target.to(device)
        for xm, ym in zip(*(one.tensor_split(microbatches) for one in (ids, target)), strict=True):
            dtype = DTYPES.get(precision)
            with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
                output = net(input_ids=xm)
                loss = job.loss(output, ym) * (len(xm) / len(ids))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        value = torch.stack(losses).sum().item()
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps([statistics.median(times[SKIPPED_STEPS:]), value, peak]))


def ours(args: argparse.Namespace, words: list[str]) -> tuple[float, float, int, int]:
    """Return the median seconds of a step, the last loss, the peak bytes, and the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        line = ["-m", "pipeworker", "launch", "--stages", str(args.stages)]
        line += ["--steps", str(args.steps), "--microbatches", str(args.microbatches)]
        line += [
            "--device",
            args.device,
            "--precision",
            args.precision,
            "--schedule",
            args.schedule,
        ]
        python(*line, "--run-dir", str(run), str(JOB), "--", *words, timeout=args.timeout)
        rows = [json.loads(row) for row in (run / "metrics.jsonl").open()]
        plan, summary = (json.loads((run / f"{n}.json").read_text()) for n in ("plan", "summary"))
    seconds = statistics.median(row["seconds"] for row in rows[SKIPPED_STEPS:])
    parameters = sum(stage["parameters"] for stage in plan["stages"])
    return seconds, rows[-1]["loss"], sum(summary["peak_memory_bytes"]), parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU on this host: --device cpu tries a small model")
    words = [str(args.width), str(args.layers), str(args.length)]
    loop = [str(HERE), "plain", str(args.steps), str(args.microbatches), args.device]
    found = []
    for _ in range(args.rounds):
        usual = json.loads(python(*loop, args.precision, *words, timeout=args.timeout))
        found.append((ours(args, words), usual))
    name = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    billions = found[0][0][3] / 1e9
    print(f"{billions:.2f} billion parameters, K={args.stages}, {args.precision}, on {name}")
    tokens = BATCH * args.length
    for label, rows in zip(("pipeworker", "the loop"), zip(*found, strict=True), strict=True):
        seconds, loss, peak = (statistics.median(row[i] for row in rows) for i in range(3))
        print(
            f"{label:10}  {seconds:.3f} s a step, {tokens / seconds:.0f} tokens/s, "
            f"{peak / 2**30:.2f} GiB, last loss {loss:.5f}"
        )
    ratio = statistics.median(usual[0] / own[0] for own, usual in found)
    print(f"the rate of pipeworker is {ratio:.2f} of the loop's")


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain"]:
        count, parts, where, kind, *rest = sys.argv[2:]
        plain(int(count), int(parts), where, kind, rest)
    else:
        main()
