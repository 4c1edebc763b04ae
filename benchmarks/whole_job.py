"""A Llama-like network of 16 blocks of width 512, as a module or as a list of layers.

The arguments are the number of micro-batches and ``module`` or ``list``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, BLOCKS, WORDS = 512, 8, 16, 1000
TIME, BATCH = 64, 2
HEAD = WIDTH // HEADS


def rotary(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of rotary positions, of shape ``[length, HEAD]``."""
    rates = 10_000.0 ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    angles = (torch.arange(length).float()[:, None] * rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, place: Any, mask: torch.Tensor) -> torch.Tensor:
        samples, time, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(samples, time, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        query, key = (rotated(one, *place) for one in heads[:2])
        mixed = functional.scaled_dot_product_attention(query, key, heads[2], attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, time, WIDTH))
        seen = self.norm2(x)
        down: torch.Tensor = self.down(functional.silu(self.gate(seen)) * self.up(seen))
        return x + down


class Module(nn.Module):
    """The network as a library writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        length = ids.shape[1]
        place, mask = rotary(length), torch.ones(length, length, dtype=torch.bool).tril()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, place, mask)
        return self.head(self.norm(x))


class Alone(nn.Module):
    """A block as a layer of a list, with tables of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        cos, sin = rotary(TIME)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("mask", torch.ones(TIME, TIME, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x, (self.cos, self.sin), self.mask)


def model() -> Any:
    if sys.argv[2] == "module":
        return Module()
    return [
        nn.Embedding(WORDS, WIDTH),
        *(Alone() for _ in range(BLOCKS)),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    ]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (BATCH * int(sys.argv[1]), TIME), generator=generator)
    while True:
        yield ids, ids
