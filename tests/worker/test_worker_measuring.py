"""A worker that measures layers for the coordinator: alone, and nothing of the job is changed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
import torch
from torch import nn

from pipeworker.errors import ProcError
from pipeworker.facts.outline import LayerKind, Outline
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.profile import Measure, Measured
from pipeworker.worker.measuring import machine_of
from pipeworker.worker.worker import Worker
from support.in_process.single_worker import SingleWorker, restored_process

restored = pytest.fixture(autouse=True)(restored_process)

JOB = """
import gc
import torch
from torch import nn

alive, most = [0], [0]

class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        most[0] = max(most[0], sum(isinstance(o, Block) for o in gc.get_objects()))
        return self.dropout(self.norm(self.linear(x)))

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        SOMETHING
        return self.linear(x)

def model():
    return [nn.Linear(4, 8), *[Block] * 6, Head()]

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(params):
    return torch.optim.Adam(params)

def data():
    for _ in range(3):
        yield torch.randn(8, 4), torch.randint(0, 3, (8,))
"""


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Measurer:
    """One worker, up to the plan."""

    def __init__(self, folder: Path, text: str = JOB, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / "job.py"
        path.write_text(text.replace("SOMETHING", options.pop("head", "pass")))
        self.worker: Worker = SingleWorker().worker
        placement = Placement.identity(1)
        options["steps"] = 2
        (folder / "run").mkdir()
        job = Options(str(path), 1, 2, **options).to_json()
        welcome = Welcome(job, str(folder / "run"), placement.held, placement.replicas)
        described = self.worker.handle(welcome)
        assert isinstance(described, Described)
        self.described = described

    def measure(self, *kinds: LayerKind, in_order: bool = False, reference: bool = False) -> Any:
        measured = self.worker.handle(Measure(kinds, (), in_order, reference))
        assert isinstance(measured, Measured)
        return measured

    @property
    def module(self) -> Any:
        """The job file, as a module."""
        return __import__("sys").modules["pipeworker_job.job"]


def outline_of(measured: Measured) -> Outline:
    assert measured.outline is not None, measured.problem
    return measured.outline


def test_a_network_is_measured_in_order(tmp_path: Path) -> None:
    measurer = Measurer(tmp_path)
    assert measurer.described.outline is None  # it has no process that surveys
    measured = measurer.measure(in_order=True)
    outline = outline_of(measured)
    assert outline.of_layer == (0, 1, 1, 1, 1, 1, 1, 2)
    assert (outline.samples, outline.target_bytes) == (4, 4 * 8)
    assert measured.digests == tuple(kind.digest for kind in outline.kinds)
    assert [one.kind for one in measured.facts] == ["Linear", "Block", "Head", "loss"]
    assert all(one.forward > 0 for one in measured.facts)
    assert measured.problem == ""


def test_kinds_are_measured_alike_on_made_up_inputs(tmp_path: Path) -> None:
    measurer = Measurer(tmp_path)
    first = measurer.measure(in_order=True)
    kinds = outline_of(first).kinds
    second = measurer.measure(*kinds, reference=True)
    assert second.outline is None
    assert second.digests == first.digests
    assert second.reference > 0
    for one, other in zip(first.facts, second.facts, strict=True):
        assert one.kind == other.kind
        for name in ("parameters", "saved_bytes", "working_bytes", "output_bytes"):
            assert getattr(one, name) == getattr(other, name)
        assert (one.optimizer_bytes, one.gradient_bytes) == (
            other.optimizer_bytes,
            other.gradient_bytes,
        )


def test_never_two_layers_exist_at_once(tmp_path: Path) -> None:
    measurer = Measurer(tmp_path)
    kinds = outline_of(measurer.measure(in_order=True)).kinds
    assert measurer.module.most == [1]
    measurer.measure(*kinds, *kinds)
    assert measurer.module.most == [1]


def test_random_numbers_data_and_weights_are_as_before(tmp_path: Path) -> None:
    text = JOB.replace("[nn.Linear(4, 8), ", "nn.Sequential(nn.Linear(4, 8), ")
    text = text.replace("alive,", "own = torch.Generator()\nalive,")
    text = text.replace("*[Block] * 6, Head()]", "*[Block() for _ in range(2)], Head())")
    text += "\nmade, build = [], model\ndef model():\n    made.append(build())\n    return made[-1]"
    measurer = Measurer(tmp_path, text, head="torch.rand(1, generator=own)")
    own = measurer.module.own.get_state()
    (layers,) = measurer.module.made
    before = [{k: v.clone() for k, v in layer.state_dict().items()} for layer in layers]
    states = torch.get_rng_state(), random.getstate()
    batch = measurer.worker.loaded.reader.peek()
    measured = measurer.measure(in_order=True)
    measurer.measure(*outline_of(measured).kinds)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(measurer.module.own.get_state(), own)
    assert measurer.worker.loaded.reader.peek() is batch
    for layer, state in zip(layers, before, strict=True):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, state[name])
        assert all(parameter.grad is None for parameter in layer.parameters())
        assert layer.training


def test_graphs_of_the_users_compiler_are_not_kept(tmp_path: Path) -> None:
    text = JOB.replace(
        "def model():",
        """graphs = []

def note(graph, inputs):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=note)
def squared(x):
    return x * x

def model():""",
    )
    measurer = Measurer(tmp_path, text, head="x = squared(x)")
    sample = torch.ones(4, 8)
    for _ in range(2):
        measurer.module.squared(sample)
    assert len(measurer.module.graphs) == 1
    measurer.measure(in_order=True)
    before = len(measurer.module.graphs)
    measurer.module.squared(sample)  # as in a worker that has not measured
    assert len(measurer.module.graphs) == before + 1


def test_a_layer_that_raises_is_left_out(tmp_path: Path) -> None:
    measurer = Measurer(tmp_path)
    kinds = outline_of(measurer.measure(in_order=True)).kinds
    wrong = LayerKind("wrong", 1, kinds[0].input)  # a Block with another width
    gone = LayerKind("gone", 1, b"no signature")
    measured = measurer.measure(kinds[0], wrong, kinds[1], gone)
    assert measured.digests == (kinds[0].digest, kinds[1].digest)
    assert measured.problem.startswith("layer 1: not a signature")


def test_a_network_that_raises_has_no_outline(tmp_path: Path) -> None:
    measurer = Measurer(tmp_path, head="raise ValueError('no head')")
    measured = measurer.measure(in_order=True)
    assert measured.outline is None
    assert "no head" in measured.problem
    assert [one.kind for one in measured.facts] == ["Linear", "Block"]


PROBABILITIES = """
def model():
    return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())

def loss(output, target):
    SOMETHING
    return nn.functional.binary_cross_entropy(output, torch.eye(3)[target])
"""


def test_a_loss_gets_what_the_last_layer_returns(tmp_path: Path) -> None:
    measurer = Measurer(tmp_path, JOB + PROBABILITIES)
    first = measurer.measure(in_order=True)
    loss = outline_of(first).kinds[-1]
    assert loss.digest in first.digests
    assert first.problem == ""
    made_up = measurer.measure(loss)
    assert made_up.digests == ()
    assert made_up.problem.startswith("loss() raised RuntimeError: all elements of input should")


def test_a_loss_that_raises_leaves_the_layers_their_facts(tmp_path: Path) -> None:
    text = JOB + PROBABILITIES.replace("SOMETHING", "raise ValueError('no loss')")
    measured = Measurer(tmp_path, text).measure(in_order=True)
    assert outline_of(measured).of_layer == (0, 1)
    assert [one.kind for one in measured.facts] == ["Linear", "Sigmoid"]
    assert measured.problem == "loss() raised ValueError: no loss"


def test_a_worker_describes_its_machine(tmp_path: Path) -> None:
    machine = Measurer(tmp_path).described.machine
    assert machine is not None
    assert machine.name
    assert 0 < machine.base_bytes < machine.limit


def test_a_layer_with_a_sparse_buffer_may_be_built_already() -> None:
    layer = nn.Module()
    layer.register_buffer("edges", torch.eye(3).to_sparse())
    assert machine_of(torch.device("cpu"), [layer]).base_bytes > 0


def test_layers_that_are_built_already_are_no_part_of_the_base() -> None:
    layer = nn.Linear(2000, 1000)
    cpu = torch.device("cpu")
    difference = machine_of(cpu, []).base_bytes - machine_of(cpu, [layer, lambda: layer]).base_bytes
    assert abs(difference - 4 * 2_001_000) < 2_000_000


def test_an_accelerator_grants_what_its_allocator_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (70, 100),
        memory_reserved=lambda device: 20,
        get_device_name=lambda device: "a device",
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    machine = machine_of(torch.device("cuda", 0), [])
    assert (machine.name, machine.limit, machine.base_bytes) == ("a device", 90, 0)


def test_without_the_option_nothing_is_described(tmp_path: Path) -> None:
    described = Measurer(tmp_path, balance="even", recompute="never").described
    assert described.outline is None
    assert described.machine is None


def test_memory_whose_size_cannot_be_read_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container without /proc, where the worker would fail later if it is not planned."""

    def refuse() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    reason = r"^/proc: /proc/meminfo cannot be read \(No such file or directory\); mount it: "
    with pytest.raises(ProcError, match=reason):
        machine_of(torch.device("cpu"), [])
