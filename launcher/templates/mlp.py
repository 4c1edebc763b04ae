"""A small network that learns to tell three spirals apart.

Train it in two processes:

    pipeworker launch --stages 2 model.py

This is plain PyTorch. pipeworker looks for the names below; put your own in their place.
"""

import torch
from torch import nn


# The network: layers, one after the other. pipeworker cuts the list into as many stages as you ask
# for, and each stage runs in a process of its own. The numbers are the same for any number of them.
def model():
    return nn.Sequential(
        nn.Linear(2, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 3),
    )


# What is to become small: one number, the mean over the samples it is given.
def loss(output, target):
    return nn.functional.cross_entropy(output, target)


# Any optimizer of torch's. It is called once on each stage, with the parameters of that stage.
def optimizer(params):
    return torch.optim.AdamW(params, lr=2e-3)


# What the network learns from: mini-batches, each a pair of an input and a target. A DataLoader
# does as well. Training goes through it once; --epochs 3 goes through it three times.
def data():
    for _ in range(400):
        yield spirals(256)


# What it is tried on with --evaluate-every 100 (or --evaluate-every epoch); you may leave it out.
def evaluation():
    for _ in range(4):
        yield spirals(256)


# What to say of a mini-batch of evaluation() besides the loss; you may leave it out.
def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def spirals(count):
    """Points in the plane, (count, 2), and the arm of the spiral each is on, (count,)."""
    arm = torch.randint(3, (count,))
    radius = torch.rand(count)
    angle = 2 * torch.pi * (arm / 3 + radius) + 0.2 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm
