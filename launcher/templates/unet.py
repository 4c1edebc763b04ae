"""A small U-Net that learns to remove the noise from images.

Train it:

    pipeworker launch --stages 2 --evaluate-every 50 model.py

Its skip connections lead from early layers to late ones. A layer stashes a tensor under a name and
a later one pops it. The tensor goes straight from the stage of the one to that of the other.
"""

import torch
from torch import nn

import pipeworker

SIZE = 32  # pixels, both ways


class Down(nn.Module):
    """A convolution, which is kept for the way up; then half as many pixels, both ways."""

    def __init__(self, before, after):
        super().__init__()
        self.name = f"of {after} channels"
        self.convolution = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.convolution(x))
        pipeworker.stash(self.name, x)
        return nn.functional.max_pool2d(x, 2)


class Up(nn.Module):
    """Twice as many pixels, both ways; then a convolution of them and of what was kept."""

    def __init__(self, before, after):
        super().__init__()
        self.name = f"of {after} channels"
        self.convolution = nn.Conv2d(before + after, after, 3, padding=1)

    def forward(self, x):
        x = nn.functional.interpolate(x, scale_factor=2)
        kept = pipeworker.pop(self.name)
        return torch.relu(self.convolution(torch.cat([x, kept], 1)))


# The network: layers, one after the other, in an nn.Sequential or a list. pipeworker cuts it into
# stages between them, wherever skip connections lead.
def model():
    return nn.Sequential(
        Down(1, 8),
        Down(8, 16),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        Up(32, 16),
        Up(16, 8),
        nn.Conv2d(8, 1, 3, padding=1),
    )


# What is to become small: one number, the mean over the samples it is given.
def loss(output, target):
    return nn.functional.mse_loss(output, target)


# Any optimizer of torch's. It is called once on each stage, with the parameters of that stage.
def optimizer(params):
    return torch.optim.AdamW(params, lr=4e-3)


# What the network learns from: mini-batches, each a pair of an input and a target. A DataLoader
# over images of your own goes here.
def data():
    for _ in range(150):
        yield images(32)


# What it is tried on with --evaluate-every; you may leave it out.
def evaluation():
    for _ in range(4):
        yield images(32)


def images(count):
    """Images of a disk each, (count, 1, SIZE, SIZE), with noise and without."""
    radius = 4 + 8 * torch.rand(count, 1, 1, 1)
    middle = SIZE / 2 + 10 * torch.rand(2, count, 1, 1, 1) - 5
    pixel = torch.arange(SIZE)
    clean = (torch.hypot(pixel.view(-1, 1) - middle[0], pixel - middle[1]) < radius).float()
    return clean + 0.7 * torch.randn_like(clean), clean
