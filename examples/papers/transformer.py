"""Transformer-L, the language model of GPipe's tables 1 and 2.

    pipeworker launch --stages 3 --steps 100 --evaluate-every 25 examples/papers/transformer.py
    pipeworker plan --stages 8 --microbatches 32 --no-profile --memory 16GB \
        examples/papers/transformer.py -- \
        --layers 48 --width 2048 --inner 8192 --heads 32 --words 32000 --context 1024

By default a small version learns the bytes of Python's help texts; the second command has the one
of GPipe's table 2 (Huang et al. 2019, 1811.06965). Its layers are those of Vaswani et al. 2017
(1706.03762), each normalised before it, with sines for positions: 50.36 million parameters a layer,
and two matrices of 32,000 words, which are not tied. A stage may end between the halves of a layer.
Texts of more than 256 words are random.
"""

import argparse
from functools import cache, partial

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(prog="transformer.py")
parser.add_argument("--layers", type=int, default=4, help="L")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--inner", type=int, default=384, help="width inside the feed-forward part")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--words", type=int, default=256, help="size of the vocabulary")
parser.add_argument("--context", type=int, default=64, help="words in a text")
parser.add_argument("--batch", type=int, default=32, help="texts in a mini-batch")
args = parser.parse_args()


class Embed(nn.Module):
    """Words with their positions: (batch, time) to (batch, time, width)."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(args.words, args.width)

    def forward(self, x):
        time = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
        power = torch.arange(0, args.width, 2, device=x.device) / args.width
        angles = time / 10_000**power
        return self.words(x) + torch.cat([angles.sin(), angles.cos()], 1)


class Attention(nn.Module):
    """The first half of a layer, causal attention: (batch, time, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.inputs = nn.Linear(args.width, 3 * args.width)
        self.outputs = nn.Linear(args.width, args.width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.inputs(self.norm(x)).view(batch, time, 3, args.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.outputs(seen.transpose(1, 2).reshape(batch, time, width))


class FeedForward(nn.Module):
    """The second half of a layer: (batch, time, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.up = nn.Linear(args.width, args.inner)
        self.down = nn.Linear(args.inner, args.width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model():
    layers = [Attention, FeedForward] * args.layers
    return [Embed, *layers, partial(nn.Linear, args.width, args.words)]


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params):
    return torch.optim.AdamW(params, lr=0.003)


@cache
def texts():
    """Return the bytes of Python's help texts: (count, context + 1)."""
    from pydoc_data.topics import topics

    joined = bytearray("".join(topics[name] for name in sorted(topics)).encode())
    count, length = len(joined) // (args.context + 1), args.context + 1
    return torch.frombuffer(joined, dtype=torch.uint8)[: count * length].view(count, length)


def batches(held_out):
    """Yield mini-batches of words and the next words, both (batch, context)."""
    every = texts()
    trained = len(every) * 9 // 10
    chosen = torch.arange(trained, len(every)) if held_out else torch.randperm(trained)
    for part in chosen.split(args.batch):
        rows = every[part].long()
        yield rows[:, :-1], rows[:, 1:]


def data():
    if args.words == 256:
        yield from batches(held_out=False)
    while args.words > 256:
        rows = torch.randint(args.words, (args.batch, args.context + 1))
        yield rows[:, :-1], rows[:, 1:]


def evaluation():
    return [batch for batch, _ in zip(batches(held_out=True), range(16), strict=False)]
