"""A small GPT learns to write Python, byte after byte, from the source of its standard library.

    pipeworker launch --stages 2 --evaluate-every 50 model.py

The text is there wherever Python is, so there is nothing to download.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn

WIDTH, HEADS, BLOCKS = 64, 4, 4
CONTEXT = 64  # bytes the model looks back
BATCH = 16  # sequences in a mini-batch
STEPS = 200


class Embed(nn.Module):
    """Bytes to vectors: (batch, time) to (batch, time, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x):
        return self.byte(x) + self.place.weight[: x.shape[1]]


class Block(nn.Module):
    """Causal self-attention, then two linear layers; both add to their input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, time, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


# The network. Entries of a list may be functions, or classes, that build a layer: each is then
# built only in the process that runs it, so that the whole model need not fit anywhere.
def model():
    return [Embed, *[Block] * BLOCKS, lambda: nn.LayerNorm(WIDTH), lambda: nn.Linear(WIDTH, 256)]


# What is to become small: one number, the mean over what it is given. Here of the next byte.
def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


# Any optimizer of torch's. It is called once on each stage, with the parameters of that stage.
def optimizer(params):
    return torch.optim.AdamW(params, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)


# A learning-rate scheduler, stepped once a step; you may leave it out.
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)


# What the network learns from: mini-batches, each a pair of an input and a target. What is random
# here depends on --seed alone.
def data():
    text = library()
    for _ in range(STEPS):
        yield sequences(text[:-100_000])


# What it is tried on with --evaluate-every: text it has not seen; you may leave it out.
def evaluation():
    text = library()
    for _ in range(4):
        yield sequences(text[-100_000:])


def library():
    """Read the first megabytes of the standard library's source, as numbers from 0 to 255."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def sequences(text):
    """Somewhere in the text: bytes, (BATCH, CONTEXT), and the byte that follows each."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
    found = text[starts + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]
