"""The outline of a network: its kinds of alike layers, and what these are called with."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipeworker
from pipeworker.facts.connections import Tie
from pipeworker.facts.layer_facts import LayerSkip
from pipeworker.facts.outline import LayerKind, Outline
from pipeworker.facts.step import Batch
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.worker.model.survey import Found, Survey, fresh_layer
from pipeworker.worker.profile.counts import counting
from pipeworker.worker.profile.measure import LayerCall
from pipeworker.worker.profile.outline import Drawing, Examine, with_loss
from pipeworker.worker.profile.signature import ValueSignature
from pipeworker.worker.transport.structure import NO_TYPES

CPU = torch.device("cpu")
Layers = Sequence[nn.Module | Callable[[], nn.Module]]


class Residual(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(8, 8)

    def forward(self, value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**value, "x": value["x"] + self.linear(value["x"])}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)

    def forward(self, value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": self.table(value["ids"]), "mask": value["mask"]}


class Down(nn.Module):
    def __init__(self, level: int, width: int) -> None:
        super().__init__()
        self.level = f"level {level}"
        self.conv = nn.Conv2d(width, 2 * width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipeworker.stash(self.level, x)
        return nn.functional.max_pool2d(self.conv(x), 2)


class Up(nn.Module):
    def __init__(self, level: int, width: int) -> None:
        super().__init__()
        self.level = f"level {level}"
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = self.conv(nn.functional.interpolate(x, scale_factor=2))
        return wide + pipeworker.pop(self.level)


UNET: Layers = [Down(0, 2), Down(1, 4), nn.Identity(), Up(1, 4), Up(0, 2)]
LANGUAGE: Layers = [Embed(), *[lambda i=i: Residual(i) for i in range(5)], Residual(9).eval()]
IDS = {"ids": torch.tensor([[3, 9, 4], [29, 5, 6]]), "mask": torch.ones(2, dtype=torch.bool)}


def begun(
    ties: Sequence[Tie] = (), examine: Examine | None = None, *, reuses: bool = True
) -> Drawing:
    return Drawing({}, "surroundings", ties, examine, reuses)


def found(layers: Layers, value: Any, drawing: Drawing | None = None) -> Found:
    return Survey(layers, 0, CPU).on_fakes(value, drawing or begun())


def outlined(layers: Layers, value: Any, drawing: Drawing | None = None) -> Outline:
    outline: Outline = found(layers, value, drawing)["outline"]
    return outline


def drawn_in_order(layers: Layers, value: Any, examine: Examine | None = None) -> Drawing:
    drawing = begun((), examine, reuses=False)
    Survey(layers, 0, CPU).in_order(value, Tracker(), drawing)
    return drawing


def called_with(kind: LayerKind) -> Any:
    return ValueSignature.unpack(kind.input).make(NO_TYPES, CPU)


def test_alike_layers_are_of_one_kind() -> None:
    outline = outlined(LANGUAGE, IDS)
    assert outline.of_layer == (0, 1, 1, 1, 1, 1, 2)
    assert [kind.layer for kind in outline.kinds] == [0, 1, 6]
    assert outline.input_bytes == 8 * 6 + 2
    assert (outline.skips, outline.ties) == ((), ())


def test_a_layer_like_an_earlier_one_is_not_called_on_fake_tensors() -> None:
    calls = 0

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    outlined([Counted(8, 8) for _ in range(20)], torch.zeros(2, 8))
    assert calls == 2  # its input requires no gradient, and that of all others does


def test_kinds_are_called_with_the_shapes_of_the_network() -> None:
    outline = outlined(LANGUAGE, IDS)
    first, block, _ = map(called_with, outline.kinds)
    assert first["ids"].shape == (2, 3)
    assert int(first["ids"].min()) >= 3
    assert int(first["ids"].max()) <= 29
    assert block["x"].shape == (2, 3, 8)
    assert block["mask"].tolist() == [True, True]  # the network's own, passed on
    wants = [ValueSignature.unpack(kind.input).wants_grad for kind in outline.kinds]
    assert wants == [(False, False), (True, False), (True, False)]


def test_layers_behind_frozen_ones_want_no_gradient() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    layers = [frozen, frozen, frozen, nn.Linear(8, 8), nn.Linear(8, 8)]
    outline = outlined(layers, torch.zeros(2, 8))
    assert outline.of_layer == (0, 1, 1, 2, 3)  # the first one has the network's own input
    wants = [ValueSignature.unpack(kind.input).wants_grad for kind in outline.kinds]
    assert wants == [(False,), (False,), (False,), (True,)]


def test_skip_connections_are_described() -> None:
    outline = outlined(UNET, torch.zeros(1, 2, 8, 8))
    assert outline.of_layer == (0, 1, 2, 3, 4)
    assert outline.skips == (LayerSkip(1, 3, 4 * 4 * 16), LayerSkip(0, 4, 4 * 2 * 64))
    down, _, _, up, _ = outline.kinds
    assert (down.stashed, down.popped, down.uses_skips) == (("level 0",), b"", True)
    popped = ValueSignature.unpack(up.popped)
    assert popped.make(NO_TYPES, CPU)["level 1"].shape == (1, 4, 4, 4)
    assert popped.wants_grad == (True,)
    assert not outline.kinds[2].uses_skips


def test_ties_have_the_bytes_of_their_parameter() -> None:
    ties = [Tie(("0.weight", "2.weight"))]
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)]
    outline = outlined(layers, torch.zeros(2, 8), begun(ties))
    assert outline.ties == (LayerSkip(0, 2, 4 * 64),)


def test_a_pass_on_real_tensors_finds_the_same_kinds() -> None:
    for layers, value in ((LANGUAGE, IDS), (UNET, torch.zeros(1, 2, 8, 8))):
        drawing = drawn_in_order(layers, value)
        assert drawing.outline() == outlined(layers, value)
        assert drawing.output == found(layers, value)["output"]


def test_a_pass_on_real_tensors_examines_each_kind_with_its_real_input() -> None:
    seen: list[tuple[int, Any]] = []

    def examine(kind: LayerKind, layer: nn.Module, call: LayerCall) -> LayerKind:
        seen.append((call.index, call.value))
        return kind

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    layers = [Doubling(), Doubling(), nn.Linear(2, 1)]
    value = torch.ones(3, 2)
    drawn_in_order(layers, value, examine)
    assert [index for index, _ in seen] == [0, 2]
    assert [float(value.mean()) for _, value in seen] == [1.0, 4.0]
    assert all(not value.requires_grad for _, value in seen)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_network_that_needs_numbers_has_no_outline() -> None:
    without = found([nn.Linear(8, 8), Branching()], torch.zeros(2, 8))
    assert without.keys() == {"error"}
    drawing = drawn_in_order([Branching()], torch.zeros(2, 8))
    assert drawing.outline().of_layer == (0,)


def test_the_loss_is_a_kind_by_output_target_and_layers() -> None:
    outline = outlined([nn.Linear(8, 4)], torch.zeros(2, 8))
    output = found([nn.Linear(8, 4)], torch.zeros(2, 8))["output"]
    whole = with_loss(outline, output, torch.zeros(2, 4), Batch(0, 7, 4, 0))
    assert (whole.loss, whole.kinds[1].layer, whole.kinds[1].input) == (1, 1, output)
    assert (whole.samples, whole.batch_samples, whole.target_bytes) == (2, 7, 4 * 8)
    other = with_loss(outline, output, torch.zeros(2), Batch(0, 7, 4, 0))
    assert other.kinds[1].digest != whole.kinds[1].digest


def test_an_outline_passes_between_processes() -> None:
    outline = outlined(UNET, torch.zeros(1, 2, 8, 8))
    assert pickle.loads(pickle.dumps(outline)) == outline


JOB = JobFile(
    model=None,
    loss=lambda output, target: output.sum(),
    optimizer=lambda params: torch.optim.Adam(params),
)


@pytest.mark.parametrize(("layers", "value"), [(LANGUAGE, IDS), (UNET, torch.zeros(1, 2, 8, 8))])
def test_operations_are_counted_on_fake_tensors(layers: Layers, value: Any) -> None:
    count = counting(JOB, Options("job.py", 1, 1), [])
    outline = outlined(layers, value, begun((), count))
    assert outline.of_layer == outlined(layers, value).of_layer
    for kind in outline.kinds:
        assert kind.counted is not None
    by_layer = [outline.kinds[number].counted for number in outline.of_layer]
    if layers is LANGUAGE:
        block = by_layer[1]
        assert block
        product = 2 * 6 * 8 * 8
        assert product < block.forward < 1.5 * product
        assert 2 * product < block.backward < 3.5 * product
        assert block.gradient_bytes == 4 * (64 + 8)
        assert 2 * block.gradient_bytes <= block.optimizer_bytes <= 2.1 * block.gradient_bytes


class Clipped(torch.autograd.Function):
    """Its backward needs the numbers of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (2 if gradient.abs().max() < 1 else 1)


class Clipping(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Clipped.apply(super().forward(x))  # type: ignore[no-untyped-call]


def test_a_backward_that_needs_numbers_counts_by_the_forward() -> None:
    problems: list[str] = []
    count = counting(JOB, Options("job.py", 1, 1), problems)
    layers = [nn.Linear(8, 8), Clipping(8, 8)]
    plain, clipping = outlined(layers, torch.zeros(6, 8), begun((), count)).kinds
    assert plain.counted
    assert clipping.counted
    product = 2 * 6 * 8 * 8
    assert product < clipping.counted.forward < 1.5 * product
    assert clipping.counted.backward == 2 * clipping.counted.forward
    assert clipping.counted.gradient_bytes == plain.counted.gradient_bytes == 4 * (64 + 8)
    assert problems == []


def test_the_reason_is_kept_why_a_layer_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no counts")

    monkeypatch.setattr("pipeworker.worker.profile.counts.measure_layer", fails)
    problems: list[str] = []
    count = counting(JOB, Options("job.py", 1, 1), problems)
    (kind,) = outlined([nn.Linear(8, 8)], torch.zeros(6, 8), begun((), count)).kinds
    assert kind.counted is None
    assert problems == ["layer 0: ValueError: no counts"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_is_copied_though_its_weight_has_a_graph() -> None:
    layer, x = nn.utils.weight_norm(nn.Linear(3, 3)), torch.randn(2, 3)
    expected = layer(x)
    copied = fresh_layer(nn.Sequential(layer), 0, 0)
    torch.nn.init.zeros_(layer.get_parameter("weight_g"))
    assert torch.equal(copied(x), expected)
    assert layer(x).ne(expected).any()


def test_a_layer_that_a_callable_returns_is_copied() -> None:
    """It may be the layer that will train."""
    existing = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    copied = fresh_layer(lambda: existing, 0, 0)
    ids = {id(tensor) for tensor in (*existing.parameters(), *existing.buffers())}
    for tensor in (*copied.parameters(), *copied.buffers()):
        assert id(tensor) not in ids
        tensor.detach().fill_(7)
    assert not any((tensor == 7).any() for tensor in existing.state_dict().values())


def test_a_layer_that_cannot_be_copied_is_used_itself() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.lock = threading.Lock()

    assert isinstance(fresh_layer(Locked, 0, 0), Locked)
