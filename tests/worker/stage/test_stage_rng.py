"""Seeds that differ along every axis, and a stream that goes on where it was."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.worker.stage import rng

numbers = st.integers(0, 2**31)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@given(numbers, numbers, numbers, numbers)
def test_a_seed_differs_along_every_axis(seed: int, step: int, microbatch: int, layer: int) -> None:
    base = (seed, step, microbatch, layer)
    seeds = {rng.layer_seed(*base)}
    for axis in range(4):
        other = list(base)
        other[axis] += 1
        seeds.add(rng.layer_seed(*other))
    assert len(seeds) == 5
    assert rng.layer_seed(*base) in seeds
    assert all(0 <= s < 2**64 for s in seeds)


def test_seeds_of_small_numbers_are_all_distinct() -> None:
    layers = {rng.layer_seed(*path) for path in product(range(4), repeat=4)}
    builds = {rng.build_seed(*path) for path in product(range(8), repeat=2)}
    epochs = {rng.data_seed(*path) for path in product(range(8), repeat=2)}
    assert len(layers | builds | epochs) == 256 + 64 + 64


def test_seeds_are_the_same_everywhere() -> None:
    """They are part of what a job's numbers are: a change of them breaks every resumed run."""
    assert rng.layer_seed(0, 1, 2, 3) == 3745318283368431323
    assert rng.build_seed(0, 1) == 3679359145602561151
    assert rng.data_seed(0, 1) == 9035333874260925832


@given(st.integers(0, 2**64 - 1))
def test_every_generator_is_seeded(seed: int) -> None:
    rng.seed_all(seed)
    first = draw()
    draw()
    rng.seed_all(seed)
    assert draw() == first


def test_another_seed_draws_other_numbers_from_each_generator() -> None:
    rng.seed_all(1)
    one = draw()
    rng.seed_all(2)
    assert all(a != b for a, b in zip(one, draw(), strict=True))


def test_torch_alone_draws_as_after_manual_seed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    rng.seed_all(5)
    assert torch.equal(torch.rand(3), expected)


def test_there_is_no_accelerator_generator_on_the_cpu() -> None:
    assert rng.accelerator_generator(torch.device("cpu")) is None


def test_a_stream_goes_on_where_it_was() -> None:
    rng.seed_all(9)
    expected = [draw() for _ in range(3)]
    stream = rng.Stream()
    found = []
    for turn in range(3):
        rng.seed_all(100 + turn)  # layers draw in between
        with stream.active():
            if turn == 0:
                stream.restart(9)
            found.append(draw())
    assert found == expected


def test_a_stream_has_the_accelerators_generator() -> None:
    accelerator = torch.Generator()  # stands for it

    def draws() -> list[float]:
        stream, found = rng.Stream(accelerator), []
        for turn in range(2):
            accelerator.manual_seed(100 + turn)  # a layer
            with stream.active():
                if turn == 0:
                    stream.restart(9)
                found.append(torch.rand((), generator=accelerator).item())
        with stream.active():
            states = stream.states()
        accelerator.manual_seed(0)
        with rng.Stream(accelerator).active():
            stream.continue_from(states)
            found.append(torch.rand((), generator=accelerator).item())
        return found

    accelerator.manual_seed(9)
    expected = [torch.rand((), generator=accelerator).item() for _ in range(3)]
    assert draws() == expected


def test_states_of_an_accelerator_that_is_not_here() -> None:
    rng.Stream().continue_from(rng.Stream(torch.Generator()).states())
    generator = torch.Generator().manual_seed(1)
    rng.Stream(generator).continue_from(rng.Stream().states())
    assert generator.initial_seed() == 1


def test_a_stream_goes_on_after_an_error() -> None:
    stream = rng.Stream()
    try:
        with stream.active():
            stream.restart(9)
            first = draw()
            raise ValueError
    except ValueError:
        pass
    rng.seed_all(1)
    with stream.active():
        second = draw()
    rng.seed_all(9)
    assert [first, second] == [draw(), draw()]


def test_an_accelerator_whose_module_has_no_generators_is_seeded_by_its_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``torch.mps`` is; the CPU's own generator stands for it."""

    class Module:
        manual_seed = torch.default_generator.manual_seed
        get_rng_state = torch.default_generator.get_state
        set_rng_state = torch.default_generator.set_state

    monkeypatch.setattr(torch, "get_device_module", {"mps": Module}.__getitem__)
    found = rng.accelerator_generator(torch.device("mps"))
    assert found is not None
    found.manual_seed(5)
    states = rng.Stream(found).states()
    drawn = draw()
    rng.Stream(found).continue_from(states)
    assert draw() == drawn
    assert rng.accelerator_generator(torch.device("cpu")) is None
