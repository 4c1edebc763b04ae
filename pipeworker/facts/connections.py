"""Connections of layers besides their order: skips, tied weights, shared tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Skip:
    """A tensor `name` that `source` stashes and `target` pops: layers, or their stages."""

    source: int
    target: int
    name: str


@dataclass(frozen=True, slots=True, order=True)
class SharedBuffer:
    """A buffer that forwards change, of the layers `first` and `last`: one stage has both."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that is used in several places, named as in ``nn.Sequential(*layers)``.

    Places are in model order; `stages` is empty until layers are divided among stages.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Existing:
    """A parameter of a built layer that existed before, named as in ``nn.Sequential(*layers)``.

    Places of one parameter have one `origin`, in every process of a job.
    """

    name: str
    origin: str


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The use of a parameter with an `origin` by `layer`, which does not have it; or by the loss.

    `user` is what messages call the layer or the loss, which counts as the last layer.
    """

    user: str
    layer: int
    origin: str


@dataclass(frozen=True, slots=True)
class Cached:
    """A function, of one `origin` in every process, that keeps parameters built by this one.

    `numbers` is a digest of their initial values, and `name` is the function's.
    """

    origin: str
    name: str
    numbers: int
