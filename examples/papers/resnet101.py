"""ResNet-101 in 370 layers, as torchgpipe splits it for its table of speeds.

    pipeworker launch --stages 3 --steps 60 --evaluate-every 20 examples/papers/resnet101.py
    pipeworker plan --stages 8 --microbatches 32 --no-profile --memory 16GB \
        examples/papers/resnet101.py -- \
        --depth 101 --channels 64 --side 224 --classes 1000 --noise

By default a ResNet of 26 layers learns scikit-learn's digits; the second command has the one of
torchgpipe's table (Kim et al. 2020, 2004.09910). The network is that of He et al. 2016, table 1
(1512.03385). Convolutions, normalisations and activations are layers of their own, so that a stage
may end inside a block; the input of a block passes its three convolutions by a skip connection.
"""

import argparse
from functools import partial

import digits
import torch
from torch import nn

import pipeworker

BLOCKS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""By depth, the blocks of each of four groups."""

parser = argparse.ArgumentParser(prog="resnet101.py")
parser.add_argument("--depth", type=int, default=26, choices=list(BLOCKS))
parser.add_argument("--channels", type=int, default=16, help="of the first convolution")
parser.add_argument("--side", type=int, default=32, help="points of an image's side")
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--noise", action="store_true", help="random images instead of digits")
args = parser.parse_args()


def convolution(before, after, kernel, stride=1):
    made = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out")
    return made


class Begin(nn.Module):
    """Stashes the input of a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        pipeworker.stash(f"block {self.block}", x)
        return x


class Sum(nn.Module):
    """Adds the input of the block, which is made as wide and small as its output."""

    def __init__(self, block, before, after, stride):
        super().__init__()
        self.block, self.shortcut = block, None
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                convolution(before, after, 1, stride), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        skipped = pipeworker.pop(f"block {self.block}")
        return x + (skipped if self.shortcut is None else self.shortcut(skipped))


def block(number, before, width, stride):
    """Return the layers of a block: 1 x 1, 3 x 3 and 1 x 1, the last four times as wide."""
    layers, sizes = [partial(Begin, number)], ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1))
    last = before
    for after, kernel, step in sizes:
        layers.append(partial(convolution, last, after, kernel, step))
        layers.append(partial(nn.BatchNorm2d, after))
        layers.append(nn.ReLU)
        last = after
    layers.insert(-1, partial(Sum, number, before, last, stride))
    return layers


def model():
    width = last = args.channels
    layers = [
        partial(convolution, 3, width, 7, 2),
        partial(nn.BatchNorm2d, width),
        nn.ReLU,
        partial(nn.MaxPool2d, 3, 2, 1),
    ]
    number = 0
    for group, count in enumerate(BLOCKS[args.depth]):
        for place in range(count):
            stride = 2 if group and not place else 1
            layers += block(number, last, width << group, stride)
            last, number = 4 * (width << group), number + 1
    head = [partial(nn.AdaptiveAvgPool2d, 1), nn.Flatten, partial(nn.Linear, last, args.classes)]
    return [*layers, *head]


loss = nn.functional.cross_entropy


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def data():
    if args.noise:
        return digits.noise(args.side, args.batch, args.classes)
    return digits.batches(args.side, args.batch)


def evaluation():
    return digits.batches(args.side, args.batch, held_out=True)


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}
