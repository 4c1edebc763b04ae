"""A GPT-style language model of bytes, trained on the source text of Python's standard library.

    pipeworker launch --stages 4 examples/bytelm.py
    pipeworker launch --stages 4 examples/bytelm.py -- --width 256 --blocks 10

The layers are given as callables, so that each is built only on the stage that owns it. The job
reads files as it needs them; every twentieth file is held out for evaluation.
"""

import argparse
import functools
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(prog="bytelm.py")
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--blocks", type=int, default=6)
parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences in a mini-batch")
parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
args = parser.parse_args()


class Embed(nn.Module):
    """An embedding of bytes and positions: (batch, time) to (batch, time, width)."""

    def __init__(self):
        super().__init__()
        self.byte = nn.Embedding(256, args.width)
        self.position = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        nn.init.normal_(self.byte.weight, std=0.02)

    def forward(self, x):
        return self.byte(x) + self.position[: x.shape[1]]


class Block(nn.Module):
    """Causal self-attention and an MLP, both with residuals: (batch, time, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.out = nn.Linear(args.width, args.width)
        self.up = nn.Linear(args.width, 4 * args.width)
        self.down = nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, args.heads, width // args.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """The logits of the next byte: (batch, time, width) to (batch, time, 256)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.logits = nn.Linear(args.width, 256)

    def forward(self, x):
        return self.logits(self.norm(x))


def model():
    return [Embed, *[Block] * args.blocks, Head]


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params):
    return torch.optim.AdamW(params, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, total_iters=20)


@functools.cache
def files():
    """Return the paths of the standard library's modules, as (training, held out)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(p for p in library.rglob("*.py") if "site-packages" not in p.parts)
    return [p for i, p in enumerate(found) if i % 20], found[::20]


def sequences(paths):
    """Yield mini-batches of (bytes, next bytes), both (batch, context), in the order of `paths`."""
    size = args.batch * args.context
    rest = b""
    for path in paths:
        rest += path.read_bytes()
        while len(rest) > size:
            text = torch.frombuffer(bytearray(rest[: size + 1]), dtype=torch.uint8).long()
            rest = rest[size:]
            yield text[:-1].view(args.batch, -1), text[1:].view(args.batch, -1)


def data():
    training, _ = files()
    return sequences([training[i] for i in torch.randperm(len(training))])


def evaluation():
    _, held_out = files()
    return sequences(held_out)
