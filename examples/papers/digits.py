"""Handwritten digits of 8 x 8 points (scikit-learn has 1,797 of them), enlarged to images.

The networks of the papers take images of 224 x 224 points and more; their small versions learn from
these. ``pip install '.[examples]'`` in the repository installs scikit-learn.
"""

from functools import cache

import torch

TRAINED = 1_500
"""Digits to train on; the others are for evaluation."""


@cache
def digits(side, held_out):
    """Return images (count, 3, side, side) with values in 0..1 and labels (count,)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).div_(16).unsqueeze(1)
    images = torch.nn.functional.interpolate(images, size=(side, side), mode="bilinear")
    labels = torch.tensor(found.target)
    chosen = slice(TRAINED, None) if held_out else slice(TRAINED)
    return images[chosen].expand(-1, 3, -1, -1), labels[chosen]


def batches(side, size, held_out=False):
    """Yield mini-batches of images and labels: in a new order, or those held out in theirs."""
    images, labels = digits(side, held_out)
    order = torch.arange(len(labels)) if held_out else torch.randperm(len(labels))
    for chosen in order.split(size):
        yield images[chosen], labels[chosen]


def noise(side, size, classes):
    """Yield mini-batches of random images and labels: to measure a network, not to train one."""
    while True:
        yield torch.randn(size, 3, side, side), torch.randint(classes, (size,))
