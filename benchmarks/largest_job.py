"""Networks of GPipe's Table 1 whose size is one number; the arguments are NET, SIZE and FRACTION.

``transformer`` has SIZE layers of width 2048 and 8192, 32 heads, 32k words, and 1,024 words a
sample. ``amoebanet`` has 18 cells of separable convolutions and pools on two inputs, SIZE channels,
and images of 224 x 224. FRACTION is the part of the device's memory that the job may use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

NET, SIZE, FRACTION = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
WORDS, TIME, WIDTH, WIDE, HEADS, CELLS = 32_000, 1024, 2048, 8192, 32, 18
BATCH = {"transformer": 32, "amoebanet": 128}[NET]

if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(FRACTION)


class Separable(nn.Sequential):
    def __init__(self, width: int, kernel: tuple[int, int], stride: int) -> None:
        pad = kernel[0] // 2, kernel[1] // 2
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(width, width, kernel, stride, pad, groups=width, bias=False),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )


class Cell(nn.Module):
    """Five sums of two operations each, as in AmoebaNet, reduced to the input's width.

    Maps (before, x), both (batch, width, height, width of the image), to the next such pair.
    """

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(
            [
                Separable(width, (3, 3), stride),
                Separable(width, (1, 7), stride),
                nn.AvgPool2d(3, stride, 1),
                nn.MaxPool2d(3, stride, 1),
                Separable(width, (7, 1), stride),
            ]
        )
        self.after = nn.ModuleList([Separable(width, (3, 3), 1) for _ in range(5)])
        self.skip = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.narrow = nn.Conv2d(5 * width, width, 1, bias=False)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        before, x = pair
        sums = [
            after(way(x)) + self.skip(before)
            for way, after in zip(self.ways, self.after, strict=True)
        ]
        return self.skip(x), self.narrow(torch.cat(sums, 1))


class Stem(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, SIZE, 3, 4, 1, bias=False), nn.BatchNorm2d(SIZE))

    def forward(self, x: torch.Tensor) -> Any:
        x = self[1](self[0](x))
        return x, x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 1000)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.linear(pair[1].mean((2, 3)))
        return output


def model() -> list[Any]:
    if NET == "amoebanet":
        cells = [partial(Cell, SIZE, 2 if n in (6, 12) else 1) for n in range(CELLS)]
        return [Stem, *cells, Head]
    layer = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, WIDE, dropout=0.0, batch_first=True)
    return [partial(nn.Embedding, WORDS, WIDTH), *[layer] * SIZE, partial(nn.Linear, WIDTH, WORDS)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-4, momentum=0.9)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(3):
        if NET == "amoebanet":
            yield torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))
        else:
            words = torch.randint(WORDS, (BATCH, TIME))
            yield words, words
    raise RuntimeError(
        "it fits"
    )  # an error, because the end of the data would write a checkpoint of this size
