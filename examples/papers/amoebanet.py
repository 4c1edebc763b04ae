"""AmoebaNet-D(L, D), the image network of GPipe's tables 1 and 2.

    pipeworker launch --stages 3 --steps 100 --evaluate-every 25 examples/papers/amoebanet.py
    pipeworker plan --stages 8 --microbatches 32 --no-profile --memory 16GB \
        examples/papers/amoebanet.py -- \
        --cells 18 --filters 256 --side 224 --classes 1000 --noise

By default a small version learns scikit-learn's digits; the second command has the one of GPipe's
table 2 (Huang et al. 2019, 1811.06965). L is the number of normal cells and D the number of
filters: two reduction cells behind the first convolution, three groups of L/3 normal cells, and a
reduction cell between groups, each of which doubles the filters. The cells are those of Real et al.
2019 (1802.01548), figure 2; what a normal cell concatenates, which that figure shows otherwise, is
as in the implementation for TPUs that GPipe counts the parameters of, as torchgpipe found out.

A layer maps (images, images of the layer before), both (batch, width, height, width of the image).
"""

import argparse
from functools import partial

import digits
import torch
from torch import nn

parser = argparse.ArgumentParser(prog="amoebanet.py")
parser.add_argument("--cells", type=int, default=3, help="L, a multiple of three")
parser.add_argument("--filters", type=int, default=48, help="D, a multiple of 8")
parser.add_argument("--side", type=int, default=32, help="points of an image's side")
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--noise", action="store_true", help="random images instead of digits")
args = parser.parse_args()


def convolved(before, width, kernel=(1, 1), stride=(1, 1)):
    """Return the unit of all cells: activation, convolution, normalisation."""
    padding = tuple(size // 2 for size in kernel)
    return (
        nn.ReLU(),
        nn.Conv2d(before, width, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(width),
    )


class Halved(nn.Module):
    """Half the height and width, with the information of all points: two shifted convolutions."""

    def __init__(self, before, width):
        super().__init__()
        self.even = nn.Conv2d(before, width // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(before, width // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        x = torch.relu(x)
        shifted = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))


def point(width, stride):
    return nn.Sequential(*convolved(width, width, stride=(stride, stride)))


def square(width, stride):
    narrow = width // 4
    return nn.Sequential(
        *convolved(width, narrow),
        *convolved(narrow, narrow, (3, 3), (stride, stride)),
        *convolved(narrow, width),
    )


def cross(width, stride):
    narrow = width // 4
    return nn.Sequential(
        *convolved(width, narrow),
        *convolved(narrow, narrow, (1, 7), (1, stride)),
        *convolved(narrow, narrow, (7, 1), (stride, 1)),
        *convolved(narrow, width),
    )


def average(width, stride):
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def largest(width, stride):
    return nn.MaxPool2d(3, stride, 1)


def largest_of_four(width, stride):
    return nn.MaxPool2d(2, stride)


def same(width, stride):
    return Halved(width, width) if stride > 1 else nn.Identity()


NORMAL = (
    ((1, point), (1, largest)),
    ((1, same), (0, cross)),
    ((0, point), (0, cross)),
    ((2, largest), (2, same)),
    ((1, average), (5, point)),
)
REDUCTION = (
    ((0, largest_of_four), (0, largest)),
    ((2, same), (1, square)),
    ((2, cross), (2, largest)),
    ((3, same), (1, largest_of_four)),
    ((2, average), (3, point)),
)
"""Five sums of two operations each, on the cell's two inputs (0 and 1) and on earlier sums."""
JOINED = {NORMAL: (0, 3, 4, 6), REDUCTION: (4, 5, 6)}
"""A cell concatenates these inputs and sums: most of them are used by nothing else in it."""


class Cell(nn.Module):
    """One cell: `before` and `last` are the widths of its inputs, `width` that of its sums."""

    def __init__(self, sums, before, last, width, after_reduction):
        super().__init__()
        self.last = nn.Sequential(*convolved(last, width))
        self.before = nn.Identity()
        if after_reduction:
            self.before = Halved(before, width)
        elif before != width:
            self.before = nn.Sequential(*convolved(before, width))
        stride = 2 if sums is REDUCTION else 1
        self.sums, self.joined = sums, JOINED[sums]
        self.operations = nn.ModuleList(
            operation(width, stride if source < 2 else 1)
            for pair in sums
            for source, operation in pair
        )

    def forward(self, pair):
        last, before = pair
        states = [self.last(last), self.before(before)]
        operations = iter(self.operations)
        for sources in self.sums:
            first, second = (next(operations)(states[source]) for source, _ in sources)
            states.append(first + second)
        return torch.cat([states[state] for state in self.joined], 1), last


class Stem(nn.Module):
    """The first convolution, with half the height and width."""

    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images):
        x = self.norm(self.convolution(images))
        return x, x


class Head(nn.Module):
    """The logits of the classes, from the mean over all points."""

    def __init__(self, width, classes):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, pair):
        return self.linear(pair[0].mean((2, 3)))


def model():
    normal, width = [NORMAL] * (args.cells // 3), args.filters // 4
    kinds = [REDUCTION, REDUCTION, *normal, REDUCTION, *normal, REDUCTION, *normal]
    layers, before, last, after_reduction = [partial(Stem, width)], width, width, False
    for sums in kinds:
        width *= 2 if sums is REDUCTION else 1
        layers.append(partial(Cell, sums, before, last, width, after_reduction))
        before, last = last, len(JOINED[sums]) * width
        after_reduction = sums is REDUCTION
    return [*layers, partial(Head, last, args.classes)]


loss = nn.functional.cross_entropy


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def data():
    if args.noise:
        return digits.noise(args.side, args.batch, args.classes)
    return digits.batches(args.side, args.batch)


def evaluation():
    return digits.batches(args.side, args.batch, held_out=True)


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}
