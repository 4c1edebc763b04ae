"""Compiled layers: one graph each, and the same bits for any number of stages.

Kernels take long to compile: ``benchmarks/compiled.py`` checks that their bits are the same.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import reset
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.codecache import compiled_fx_graph_hash
from torch.compiler import config as compiler_config

from pipeworker.facts.connections import Skip
from pipeworker.facts.position import Phase, Position
from pipeworker.host.position import Tracker
from pipeworker.plan.placement import Placement
from pipeworker.worker.internals import allow_any_number_of_graphs
from pipeworker.worker.stage.layers import StageConfig, compiled, reporting_compilation
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Stage
from support.in_process.layers import Noise, Pop, Stash, data, mse
from support.in_process.pipelines import Pipeline, filled
from support.in_process.plain_loop import Batches, Trained, assert_equal, plain
from support.slow import slow

EAGER = "aot_eager"
"""The backend that traces and partitions a graph as inductor does, but compiles no kernels."""
SKIPS = [Skip(1, 5, "s")]


@pytest.fixture(autouse=True)
def _reset_dynamo() -> None:
    reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(6),
            nn.Linear(6, width),
            nn.Linear(width, 6),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return nn.functional.dropout(x, 0.2, self.training)


def layers() -> list[nn.Module]:
    """Return stateful, random and in-place layers with a skip; one class has two sizes."""
    hooked = nn.Linear(6, 6)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    return [
        *(hooked, Stash("s"), Block(12), nn.BatchNorm1d(6), nn.ReLU(inplace=True), Pop("s")),
        *(Block(20), Noise(), nn.Linear(6, 2)),
    ]


def train(stages: int, mode: str, built: list[nn.Module], batches: Batches) -> Trained:
    way = filled(Placement.identity(stages), mode)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    pipeline = Pipeline(
        copy.deepcopy(built),
        *(mse, batches, way),
        microbatches=3,
        skips=SKIPS if len(built) > 5 else (),
        optimizer=optimizer,
        compiler=EAGER,
        limit=120.0,
    )
    return pipeline.train(len(batches))


@slow
def test_traced_layers_without_new_kernels_equal_the_plain_loop() -> None:
    built, batches = layers(), data(9, 7)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expected = plain(copy.deepcopy(built), mse, batches, 3, optimizer)
    assert_equal(train(3, "except_first", built, batches), expected)


def test_the_tracker_shows_compilation_and_then_the_position_before_it() -> None:
    tracker = Tracker()
    at, seen = Position(Phase.FORWARD, 3, 1, 2), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.append(tracker.get())
        return graph

    (layer,) = compiled([nn.Linear(2, 2)], backend)
    with reporting_compilation(tracker):
        tracker.set(at.phase, at.step, at.microbatch, at.layer)
        for _ in range(2):
            layer(torch.ones(1, 2))
        assert seen == [dataclasses.replace(at, phase=Phase.COMPILING)]
        assert tracker.get() == at
        tracker.wait(4)  # a compilation during a wait is not one of this worker's layers
        layer(torch.ones(2, 2))
        assert seen[1:] == [Position(Phase.WAITING, 4)]
        assert tracker.waiting
    tracker.set(at.phase)
    layer(torch.ones(3, 2))
    assert seen[2:] == [Position(at.phase)]


@slow
def test_autocast_of_traced_layers_equals_eager() -> None:
    torch.manual_seed(0)
    built = [nn.Linear(6, 6), Block(12), nn.Linear(6, 2)]
    found = []
    for backend in (None, EAGER):
        stage = Stage(
            copy.deepcopy(built),
            StageConfig(
                0, 0, seed=0, device=torch.device("cpu"), precision="bf16", compiler=backend
            ),
            Tracker(),
            loss=lambda output, _: output.float().square().mean(),
        )
        stage.begin(1)
        mb = MicroBatch(
            0, recompute=True, value=torch.linspace(-1, 1, 24).view(4, 6), wants_grad=[False]
        )
        stage.forward(mb)
        stage.recompute(mb)
        stage.backward(mb)
        assert mb.loss is not None
        found.append([mb.loss, *(p.grad for layer in stage.layers for p in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_backward_leaves_what_its_second_part_needs() -> None:
    """Otherwise a graph's backward may write its results there, and runs once."""
    compiled([nn.Linear(2, 2)], EAGER)[0](torch.ones(1, 2))
    assert not functorch_config.donated_buffer


def test_graphs_of_other_programs_are_not_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their backwards may write results into what a second part needs, and torch's key is equal."""

    def key() -> str:
        graph = torch.fx.symbolic_trace(nn.ReLU())
        found: str = compiled_fx_graph_hash(graph, [torch.ones(2)], {}, [])[0]
        return found

    allow_any_number_of_graphs()
    with ThreadPoolExecutor(1) as thread:
        keys = [key(), thread.submit(key).result()]
    monkeypatch.setattr(compiler_config, "cache_key_tag", "")
    assert key() not in keys


def test_a_tag_of_the_environment_replaces_no_tag_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's threads it would count before a default; it still distinguishes graphs."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "-mine")
        setting = compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        patch.setattr(setting, "env_value_default", "-mine")
        allow_any_number_of_graphs()
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(lambda: compiler_config.cache_key_tag).result()
        assert found == compiler_config.cache_key_tag == "pipeworker-mine"
    allow_any_number_of_graphs()


def test_a_thread_of_torch_runs_a_split_backward_after_a_whole_one() -> None:
    """On an accelerator all backwards run in such a thread, with no settings of this one."""
    (layer,) = compiled([nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))], EAGER)

    def total() -> torch.Tensor:
        output: torch.Tensor = layer(torch.ones(2, 4, requires_grad=True))
        return output.sum()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(total().backward).result()
        thread.submit(partial(total().backward, retain_graph=True)).result()


@slow
def test_equal_layers_share_a_graph_and_any_number_of_layers_is_compiled() -> None:
    train(1, "never", [nn.Linear(6, 6) for _ in range(3)], data(6, out=6))
    # Two graphs, because the input of the first layer requires no gradient.
    assert counters["stats"]["unique_graphs"] == 2
    reset()
    counters.clear()
    widths = [6, *range(7, 16), 2]
    sizes: list[nn.Module] = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    train(1, "never", sizes, data(6))
    assert counters["stats"]["unique_graphs"] == len(sizes)
