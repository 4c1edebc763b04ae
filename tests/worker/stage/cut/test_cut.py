"""A module that is no sequence is cut into layers: the bits are those of its own forward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.draws import some
from support.in_process.cut_modules import (
    WIDTH,
    Whole,
    assert_same_tensors,
    mse,
    pipeline_of,
    sgd,
    vectors,
)
from support.in_process.pipelines import MODES
from support.in_process.plain_loop import assert_equal, plain
from support.slow import mostly_slow, slow

WORDS = 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        seen = self.norm(x)
        if mask is not None:
            seen = mask @ seen
        return x + torch.tanh(self.mix(seen))


class Language(nn.Module):
    """Embeddings, positions, a mask from the input, blocks in a list, a tied head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, keep: torch.Tensor | None = None) -> Any:
        length = ids.shape[1]
        mask = torch.ones(length, length).tril() / torch.arange(1.0, length + 1)[:, None]
        if keep is not None and not bool(keep.all()):
            mask = mask * keep[:, None, :]
        x = self.words(ids) * math.sqrt(WIDTH) + self.places[:length]
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Values that pass over layers, in a list, and a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        skips = []
        for layer in self.down:
            x = F.gelu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1)).relu_()
        x = x * self.scale
        x += 1
        return x


class Shared(nn.Module):
    """One block that runs several times, and its weight used outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)  # [samples, WIDTH, WIDTH]
        out = torch.zeros(x.shape[0], WIDTH)
        out[:] = x.mean(dim=1)
        out = self.last(out)
        return out + F.linear(out, self.first.weight)


class Seq2Seq(nn.Module):
    """The output of an encoder is used in every layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(
            WIDTH,
            2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=16,
            dropout=0.0,
            batch_first=True,
        )
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = self.net.generate_square_subsequent_mask(target.shape[1])
        return {"out": self.out(self.net(source, target, tgt_mask=mask, tgt_is_causal=True))}


def words(count: int = 4, length: int = 6) -> torch.Tensor:
    return torch.randint(WORDS, (count, length))


def language() -> Iterator[tuple[Any, torch.Tensor]]:
    for step in range(3):
        ids = words(length=5 + step)
        yield ids, ids


def masked() -> Iterator[tuple[Any, torch.Tensor]]:
    for step in range(3):
        ids = words()
        keep = torch.ones(ids.shape)
        keep[0, -step:] = 0 if step else 1
        yield {"ids": ids, "keep": keep}, ids


def sequences() -> Iterator[tuple[Any, torch.Tensor]]:
    for _ in range(3):
        yield torch.randn(4, WIDTH, WIDTH), torch.randn(4, WIDTH)


def pairs() -> Iterator[tuple[Any, torch.Tensor]]:
    for _ in range(3):
        yield (torch.randn(4, 5, WIDTH), torch.randn(4, 3, WIDTH)), torch.randn(4, 3, 3)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> Any:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]], Any]] = {
    "language": (Language, language, cross_entropy),
    "masked": (Language, masked, cross_entropy),
    "unet": (UNet, vectors, mse),
    "seq2seq": (Seq2Seq, pairs, mse),
}


def build(name: str) -> tuple[nn.Module, list[Any], Any]:
    make, batches, loss = CASES[name]
    torch.manual_seed(3)
    return make(), list(batches()), loss


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=slow if (number + turn) % 4 else (), id=f"{name}-{way}")
        for number, name in enumerate(CASES)
        for turn, way in enumerate(zip((3, 2, 3, 1), MODES, strict=True))
    ],
)
def test_equals_the_modules_own_forward(name: str, way: tuple[int, str]) -> None:
    stages, mode = way
    module, batches, loss = build(name)
    expected = plain([Whole(copy.deepcopy(module))], loss, batches, 2, sgd)
    trained = pipeline_of(module, batches, loss, stages, mode).train(3)
    assert trained.losses == expected.losses
    for grads, wanted in zip(trained.grads, expected.grads, strict=True):
        assert_same_tensors(grads, wanted)
    assert_same_tensors(trained.weights, expected.weights)


TIED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]], Any]] = {
    "head": (lambda: Language(tied=True), language, cross_entropy),
    "repeated": (Shared, sequences, mse),
}


@pytest.mark.parametrize("name", mostly_slow(["repeated", "head"], 2))
def test_a_parameter_of_several_layers_is_equal_for_any_number_of_stages(name: str) -> None:
    make, batches, loss = TIED[name]
    torch.manual_seed(3)
    module, data = make(), list(batches())
    near = plain([Whole(copy.deepcopy(module))], loss, data, 2, sgd)
    found = []
    for stages, mode in some(zip((1, 2, 3), MODES, strict=False), 2):
        found.append(pipeline_of(module, data, loss, stages, mode).train(3))
    for trained in found[1:]:
        assert_equal(trained, found[0])
    for losses, wanted in zip(found[0].losses, near.losses, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", mostly_slow(["head", "repeated"], 2))
def test_with_one_micro_batch_a_parameter_of_several_layers_equals_the_plain_loop(
    name: str,
) -> None:
    make, batches, loss = TIED[name]
    torch.manual_seed(3)
    module, data = make(), list(batches())
    expected = plain([Whole(copy.deepcopy(module))], loss, data, 1, sgd)
    for stages in (1, 3):
        pipeline = pipeline_of(module, data, loss, stages, "never", microbatches=1)
        assert pipeline.train(3).losses == expected.losses
