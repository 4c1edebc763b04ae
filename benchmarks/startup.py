"""The time from the command to the first forward of a layer, relative to one `import torch`.

python benchmarks/startup.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
import time
import torch
from torch import nn

class First(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "reported"):
            self.reported = True
            print("first action at", time.time(), flush=True)
        return super().forward(x)

def model():
    return [lambda: First(4, 4)] * 4

def loss(output, target):
    return (output - target).square().mean()

def optimizer(params):
    return torch.optim.AdamW(params)

def data():
    yield torch.ones(16, 4), torch.ones(16, 4)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    imports, starts = [], []
    for _ in range(rounds + 1):
        start = time.time()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.time() - start)
        with tempfile.TemporaryDirectory() as folder:
            job, run = Path(folder, "job.py"), Path(folder, "run")
            job.write_text(JOB)
            start = time.time()
            line = [sys.executable, "-m", "pipeworker", "launch", "--stages", "4"]
            subprocess.run([*line, "--run-dir", run, job], check=True, stdout=subprocess.DEVNULL)
            log = (run / "logs" / "worker-0.log").read_text()
        starts.append(float(log.split("first action at")[1].split()[0]) - start)
    pairs = list(zip(starts, imports, strict=True))[1:]
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"import torch {statistics.median(b for _, b in pairs):.2f} s  ", end="")
    print(f"launch to first action {statistics.median(a for a, _ in pairs):.2f} s")
    print(f"ratio {ratio:.2f} (target <= 2.5)")


if __name__ == "__main__":
    main()
