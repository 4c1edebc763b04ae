"""U-Net(B, C), the network with long skip connections of torchgpipe's tables.

    pipeworker launch --stages 3 --steps 60 --evaluate-every 20 examples/papers/unet.py
    pipeworker plan --stages 8 --microbatches 32 --no-profile --memory 16GB \
        examples/papers/unet.py -- \
        --blocks 5 --channels 64 --side 192 --noise

By default a small version finds the strokes of scikit-learn's digits under noise; the second
command has the one of torchgpipe's table of speeds (Kim et al. 2020, 2004.09910, section 4.2). B is
the number of convolutions in a row, C the number of channels of the first ones: five times down,
where the channels double, and five times up, where the output of the same height on the way down
arrives by a skip connection. A convolution, its dropout, normalisation and activation are a layer.
"""

import argparse
from functools import partial
from itertools import pairwise

import digits
import torch
from torch import nn

import pipeworker

parser = argparse.ArgumentParser(prog="unet.py")
parser.add_argument("--blocks", type=int, default=1, help="B")
parser.add_argument("--channels", type=int, default=8, help="C")
parser.add_argument("--side", type=int, default=64, help="points of an image's side")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--noise", action="store_true", help="random images instead of digits")
args = parser.parse_args()
LEVELS = 5


class Convolution(nn.Module):
    """A convolution with what follows it: (batch, before, height, width) to (batch, after, …)."""

    def __init__(self, before, after):
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.dropout = nn.Dropout2d(0.1)
        self.norm = nn.InstanceNorm2d(after)

    def forward(self, x):
        return nn.functional.leaky_relu(self.norm(self.dropout(self.convolution(x))))


class Down(nn.Module):
    """Half the height and width; what comes in is stashed for the way up."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def forward(self, x):
        pipeworker.stash(f"level {self.level}", x)
        return nn.functional.max_pool2d(x, 2)


class Up(nn.Module):
    """Twice the height and width, with the channels of the way down at the same level."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def forward(self, x):
        skipped = pipeworker.pop(f"level {self.level}")
        return torch.cat([nn.functional.interpolate(x, size=skipped.shape[2:]), skipped], 1)


def row(before, inside, after):
    """Return B convolutions in a row."""
    widths = [before, *[inside] * (args.blocks - 1), after]
    return [partial(Convolution, *pair) for pair in pairwise(widths)]


def model():
    c, down, up = args.channels, [], []
    for level in range(LEVELS):
        width = c * 2**level
        down += [*row(width // 2 if level else 3, width, width), partial(Down, level)]
        up = [partial(Up, level), *row(2 * width, width // 2, width // 2), *up]
    deepest = row(c * 2 ** (LEVELS - 1), c * 2**LEVELS, c * 2 ** (LEVELS - 1))
    return [*down, *deepest, *up, partial(nn.Conv2d, c // 2, 1, 1, bias=False)]


loss = nn.functional.binary_cross_entropy_with_logits


def optimizer(params):
    return torch.optim.AdamW(params, lr=0.003)


def strokes(batches):
    """Yield images under noise, and where their strokes are: (batch, 1, side, side) of 0 and 1."""
    for images, _ in batches:
        yield images + 0.5 * torch.randn_like(images), (images[:, :1] > 0.5).float()


def data():
    if args.noise:
        return strokes(digits.noise(args.side, args.batch, 1))
    return strokes(digits.batches(args.side, args.batch))


def evaluation():
    return strokes(digits.batches(args.side, args.batch, held_out=True))


def metrics(output, target):
    return {"accuracy": ((output > 0) == (target > 0.5)).float().mean()}
