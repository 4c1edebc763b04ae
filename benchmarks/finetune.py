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
import statistics
from pathlib import Path

import torch
from launches import launched
from loop import loop

JOB = Path(__file__).resolve().with_name("finetune_job.py")
BATCH = 16  # samples of a mini-batch, as in finetune_job.py


def ours(args: argparse.Namespace, words: list[int]) -> tuple[float, float, int, int]:
    """Return the median seconds of a step, the last loss, the peak bytes, and the parameters."""
    options = f"--stages {args.stages} --steps {args.steps} --microbatches {args.microbatches}"
    options += f" --device {args.device} --precision {args.precision} --schedule {args.schedule}"
    with launched(JOB, options, *words, timeout=args.timeout) as run:
        parameters = sum(stage["parameters"] for stage in run.read("plan")["stages"])
        return run.seconds, run.rows[-1]["loss"], sum(run.peaks), parameters


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
    words = [args.width, args.layers, args.length]
    shape = JOB, args.steps, args.microbatches, args.device, args.precision
    found = []
    for _ in range(args.rounds):
        usual = loop(*shape, *words, timeout=args.timeout)
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
    main()
