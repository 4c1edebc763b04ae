"""Job files that several test modules use."""

from __future__ import annotations

JOB = """
    import torch
    from torch import nn

    def model():
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        generator = torch.Generator().manual_seed(7)
        for _ in range(6):
            x = torch.randn(10, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""A small job of five layers and six mini-batches of ten samples."""

LOADER = (
    JOB.partition("def data")[0]
    + """
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 1_000

        def __getitem__(self, index):
            return torch.full((8,), index / 1_000), index % 3

    def data():
        return torch.utils.data.DataLoader(Numbers(), batch_size=10, num_workers=2)
"""
)
"""Its mini-batches come from the processes of a data loader."""

DROPOUT = JOB.replace("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.3),")

DROPOUT_JOB = """
    import random
    import torch
    from torch import nn

    class Noise(nn.Module):
        def forward(self, x):
            return x * (1 + 0.1 * random.random())

    def model():
        return [
            lambda: nn.Linear(8, 16), nn.ReLU, lambda: nn.Dropout(0.3),
            lambda: nn.BatchNorm1d(16), Noise, lambda: nn.Linear(16, 16),
            lambda: nn.Dropout(0.2), lambda: nn.Linear(16, 3),
        ]

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def data():
        for _ in range(5):
            x = torch.randn(11, 8)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""Lazy layers, everything random, batch norm, a scheduler, data from the global stream."""

NESTED_JOB = """
    import torch
    from torch import nn

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, batch):
            x, mask = batch["x"], batch["mask"]
            a = self.a(x)
            return {"a": a, "both": (a.t(), self.b(x)), "mask": mask, "scale": 2, "again": a}

    class Mix(nn.Module):
        def forward(self, value):
            left, b = value["both"]
            summed = value["a"] + left.t() * value["scale"] + value["again"]
            return summed, b, value["mask"], None

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 1)

        def forward(self, value):
            a, b, mask, nothing = value
            assert nothing is None and mask.dtype is torch.bool
            return self.out(torch.where(mask, a, b).relu_())

    def model():
        return nn.Sequential(Split(), nn.Identity(), Mix(), Join())

    def loss(output, target):
        return nn.functional.mse_loss(output, target["y"])

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def data():
        g = torch.Generator().manual_seed(3)
        for step in range(4):
            n = 9 if step % 2 else 5
            x = torch.randn(n, 6, generator=g)
            yield {"x": x, "mask": x[:, :1] > 0}, {"y": x.sum(1, keepdim=True)}
"""
"""Nested values, masks, one tensor twice, transposed tensors, in-place, changing batch sizes."""

CALM = JOB.replace("import torch", "import time\n    import torch", 1).replace(
    "x = torch", "time.sleep(0.05)\n            x = torch"
)
"""A job that mostly sleeps, for jobs that train until they are ended."""

SLEEPERS = CALM.replace(
    "def model",
    """
    import os, subprocess
    from pathlib import Path

    class Parent(nn.Module):
        child = None

        def forward(self, x):
            if self.child is None:
                self.child = subprocess.Popen(["sleep", "1000"])
                Path(f"child-{os.getpid()}").write_text(str(self.child.pid))
                for name in f"torch_{os.getpid()}_7_1", f"cuda.shm.{os.getuid()}.{os.getpid():x}.1":
                    Path("/dev/shm", name).touch()
            return x

    def model""",
).replace("nn.Tanh()", "Parent(), nn.Tanh()")
SLEEPERS = SLEEPERS.replace("sleep(0.05)", "sleep(0.05 if _ < 3 else 0.2)")
"""Layer 3, on the middle stage of three, starts a process that runs until it is killed.

It makes the files that torch and CUDA make in shared memory, too. The job sleeps for longer after
its first steps, because a test may wait for a timeout then.
"""

DIES = """
    import os
    import random
    import signal
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    HOW = sys.argv[1] if len(sys.argv) > 1 else ""
    transient = (ConnectionError,)

    class Dies(nn.Module):
        def forward(self, x):
            if HOW and done() == 3 and (HOW == "always" or not Path("died").exists()):
                Path("died").touch()
                {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                 "exit": lambda: os._exit(0),
                 "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP)}.get(HOW, self.fail)()
            return x

        def fail(self):
            raise ConnectionError("no route")

    MADE = []

    def done():
        return int(next(iter(MADE[0].state.values()), {"step": 0})["step"])

    def model():
        return nn.Sequential(
            nn.Linear(8, 32), nn.Dropout(0.1), Dies(), nn.Linear(32, 32), nn.Tanh(),
            nn.Linear(32, 3),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        MADE.append(torch.optim.AdamW(params, lr=1e-2))
        return MADE[0]

    def data():
        for _ in range(4):
            length = random.randint(5, 9)
            yield torch.randn(length, 8), torch.randint(0, 3, (length,))
"""
"""With an argument for the way, a worker dies in its fourth step: once, or ``always``."""


VARIED = """
    import torch
    from torch import nn
    import pipeworker

    class Down(nn.Linear):
        def forward(self, x):
            pipeworker.stash("x", x)
            return torch.tanh(super().forward(x))

    class Up(nn.Linear):
        def forward(self, x):
            return super().forward(x) + pipeworker.pop("x")

    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    def model():
        twice = nn.Linear(8, 8)
        return nn.Sequential(
            nn.Linear(8, 8), Down(8, 8), nn.Dropout(0.3), twice, nn.ReLU(inplace=True),
            Centre(), twice, Up(8, 8), nn.LayerNorm(8), nn.Linear(8, 3),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def data():
        generator = torch.Generator().manual_seed(7)
        for size in (20, 20, 14, 20, 4):
            x = torch.randn(size, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

    evaluation = data
"""
"""Dropout, a buffer that changes, work in place, a skip, a tie, and a mini-batch of fewer parts."""
VARIED_WORDS = ("--microbatches", "6", "--evaluate-every", "4", "--clip-grad-norm", "0.5")


def gated(source: str, line: str = "x = torch.randn(10", when: str = "_ == 5") -> str:
    """Return a job whose ``data()`` waits, before a line of it, for the file ``go``.

    Args:
        source: the job.
        line: the beginning of the line.
        when: the condition under which it waits.
    """
    indent = "\n" + 12 * " "
    return source.replace(
        line,
        f"import pathlib, time{indent}"
        f'while {when} and not pathlib.Path("go").exists():{indent}'
        f"    time.sleep(0.02){indent}{line}",
    )
