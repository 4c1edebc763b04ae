"""The layers that the networks of drawn jobs consist of."""

from __future__ import annotations

LIBRARY = """
    import contextlib
    import fcntl
    import os
    import random
    import time
    from collections import OrderedDict
    from pathlib import Path

    import torch
    from torch import nn
    from torch.nn.utils import parametrizations
    from torch.optim import lr_scheduler
    from torch.utils.checkpoint import checkpoint

    import pipeworker

    PAUSE = float(os.environ.get("PAUSE", 0))
    transient = (ConnectionError,)

    class Norm1d(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) if len(x) > 1 else x

    class Average(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.register_buffer("mean", torch.zeros(width))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.detach().float().flatten(0, -2).mean(0), 0.1)
                self.seen += len(x)
            return x - 0.1 * self.mean / (1 + 0.01 * self.seen)

    class Counter(nn.Module):
        count = 0

        def forward(self, x):
            if self.training and not pipeworker.is_recomputing():
                self.count += 1
            return x * 1.01

        def get_extra_state(self):
            return {"count": self.count, "of": torch.tensor([self.count, 1])}

        def set_extra_state(self, state):
            self.count = state["count"]

    class Noise(nn.Module):
        def forward(self, x):
            return x * (1 + 0.1 * random.random()) + 0.01 * torch.rand(x.shape[-1])

    class Poison(nn.Module):
        # Not finite in the micro-batches of one length, in forward or in backward.
        def __init__(self, value, length, backward):
            super().__init__()
            self.value, self.length, self.backward = value, length, backward

        def forward(self, x):
            if not self.training or len(x) != self.length:
                return x
            if self.backward and x.requires_grad:
                x = x.clone()
                x.register_hook(lambda gradient: gradient * self.value)
                return x
            return x * self.value

    class Sometimes(nn.Linear):
        def forward(self, x):
            return super().forward(x) if len(x) % 2 else x

    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach() if len(x) % 3 == 0 else x)

    class Frozen(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.weight.requires_grad_(False)

    class Residual(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.body = nn.Sequential(*layers)

        def forward(self, x):
            return x + self.body(x)

    class Again(Residual):
        def forward(self, x):
            return x + checkpoint(self.body, x, use_reentrant=False)

    class Recurrent(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.cell = nn.GRU(width, width, batch_first=True)

        def forward(self, x):
            return self.cell(x if x.dim() == 3 else x.unsqueeze(1))[0].reshape(x.shape)

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            return x + self.inner(x, x, x, need_weights=False)[0]

    class Stash(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            pipeworker.stash(self.name, x)
            return torch.tanh(x)

    class Pop(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            return x + 0.5 * pipeworker.pop(self.name)

    class Spread(nn.Module):
        def forward(self, x):
            return {"x": x, "pair": (x.transpose(0, -1), x > 0), "plain": [2, "word", None]}

    class Inside(nn.Linear):
        def forward(self, value):
            return {**value, "x": super().forward(value["x"])}

    class Gather(nn.Module):
        def forward(self, value):
            turned, mask = value["pair"]
            assert value["plain"] == [2, "word", None] and mask.dtype is torch.bool
            return torch.where(mask, value["x"], turned.transpose(0, -1) * value["plain"][0])

    class Ranks(nn.Module):
        def __init__(self, width, rank):
            super().__init__()
            self.a = nn.Parameter(torch.randn(rank, width) * 0.1)
            self.b = nn.Parameter(torch.zeros(width, rank))

        def forward(self, x):
            return x + x @ self.a.t() @ self.b.t()

    class Pool(nn.Module):
        def forward(self, x):
            return x.mean((2, 3))

    class Table(nn.Module):
        def __init__(self, size, width):
            super().__init__()
            self.table = nn.Parameter(torch.randn(size, width) * 0.1)

    class Lookup(Table):
        def forward(self, ids):
            return nn.functional.embedding(ids, self.table)

    class Head(Table):
        def forward(self, x):
            return x @ self.table.t()

    def decays(parameters):
        parameters = list(parameters)
        groups = ([p for p in parameters if (p.dim() > 1) == more] for more in (True, False))
        both = zip(groups, (0.1, 0.0))
        return [{"params": some, "weight_decay": decay} for some, decay in both if some]

    def bounded(path):
        # Load in no more workers than the file says, if it exists; readers do not count.
        if not path.exists() or Path("/proc/self/comm").read_text().strip() == "reader":
            return
        for number in range(int(path.read_text())):
            LOCKS.append(open(f"lock-{number}", "w"))
            with contextlib.suppress(OSError):
                fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        os._exit(7)

    LOCKS = []
    bounded(Path("limit"))
"""
"""The layers that networks are drawn from; the beginning of each drawn job file."""
