"""A convolutional network that learns to tell circles, squares and crosses apart.

Train it:

    pipeworker launch --stages 2 --evaluate-every 50 model.py

The images are drawn as they are needed, so there is nothing to download.
"""

import torch
from torch import nn

SIZE = 32  # pixels, both ways


def block(before, after):
    """Return a convolution that halves the image's height and width."""
    return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


# The network: layers, one after the other, in an nn.Sequential or a list. pipeworker cuts it into
# stages between them; --balance 5,6 says how many layers each stage gets.
def model():
    return [
        *block(1, 16),
        *block(16, 32),
        *block(32, 64),
        nn.Flatten(),
        nn.Linear(64 * (SIZE // 8) ** 2, 3),
    ]


# What is to become small: one number, the mean over the samples it is given.
def loss(output, target):
    return nn.functional.cross_entropy(output, target)


# Any optimizer of torch's. It is called once on each stage, with the parameters of that stage.
def optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3)


# A learning-rate scheduler, stepped once a step; you may leave it out.
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)


# What the network learns from: mini-batches, each a pair of an input and a target. A DataLoader
# over images of your own goes here: `return DataLoader(dataset, batch_size=64, shuffle=True)`.
def data():
    for _ in range(200):
        yield shapes(64)


# What it is tried on with --evaluate-every; you may leave it out.
def evaluation():
    for _ in range(4):
        yield shapes(64)


# What to say of a mini-batch of evaluation() besides the loss; you may leave it out.
def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def shapes(count):
    """Noisy images, (count, 1, SIZE, SIZE), and what is on each, (count,): 0, 1 or 2."""
    kind = torch.randint(3, (count,))
    size = 5 + 6 * torch.rand(count, 1, 1)
    middle = SIZE / 2 + 8 * torch.rand(2, count, 1, 1) - 4
    pixel = torch.arange(SIZE)
    down, right = (pixel.view(-1, 1) - middle[0]).abs(), (pixel - middle[1]).abs()
    far, near = torch.maximum(down, right), torch.minimum(down, right)
    circle, square = torch.hypot(down, right), far
    cross = torch.where(near < 1.5, far, SIZE)
    distance = torch.stack([circle, square, cross])[kind, torch.arange(count)]
    image = (distance < size).float() + 0.5 * torch.randn(count, SIZE, SIZE)
    return image.unsqueeze(1), kind
