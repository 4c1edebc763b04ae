"""Parameters that a layer uses and that it does not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Borrowed
from pipeworker.host.position import Tracker
from pipeworker.worker.stage.borrowed import Borrowing
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Stage
from support.in_process.cut_modules import cut
from support.in_process.layers import Layer

OTHER = nn.Linear(3, 3)
UNKNOWN = nn.Parameter(torch.ones(3))


class Uses(nn.Module):
    """A layer that computes something from its input and its own parameters."""

    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.own, self.compute = nn.Linear(3, 3), compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self.own(x))


def run(
    compute: Callable[[torch.Tensor], Any], origins: dict[int, str] | None = None
) -> list[Borrowed]:
    """Run a stage of two layers, of which `OTHER` is the first, and then its loss."""
    places = {id(OTHER.weight): "0.weight"}
    known = origins or {}
    found = Borrowing(lambda p: places.get(id(p), ""), lambda p: known.get(id(p), ""))
    layers = [OTHER, Uses(compute)]
    config = StageConfig(0, 4, 0, torch.device("cpu"), borrowing=found)
    stage = Stage(layers, config, Tracker(), loss=lambda output, _: output["x"].sum())
    for number in range(2):
        stage.begin(1)
        mb = MicroBatch(number)
        mb.value, mb.target = torch.ones(2, 3), torch.ones(2)
        stage.forward(mb)
    return found.found


def test_a_layer_that_uses_its_own_parameters_is_no_error() -> None:
    """A shape is no use, and neither is the input, which depends on other layers."""
    size = OTHER.weight
    assert run(lambda x: {"x": x * size.shape[0] + x.new_ones(size.shape[1])}) == []


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: {"x": x @ OTHER.weight.t()},
        lambda x: {"y": [x, OTHER(x)], "x": x},
        lambda x: {"x": x.mul_(OTHER.weight.sum())},
    ],
)
def test_a_layer_that_uses_a_parameter_of_another_is_an_error(
    compute: Callable[[torch.Tensor], Any],
) -> None:
    with pytest.raises(UsageError, match=r"^layer 5 \(Uses\): uses the parameter 0.weight of anot"):
        run(compute)


@pytest.mark.parametrize("at", ["layer", "loss"])
def test_a_use_that_begins_later_is_an_error(at: str) -> None:
    layer, calls = nn.Linear(3, 3), 0

    def late(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * OTHER.weight.sum() if calls == 4 else x

    def forward(x: torch.Tensor) -> torch.Tensor:
        return late(x) if at == "layer" else x

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        return (late(output) if at == "loss" else output).sum()

    found = Borrowing(lambda p: "0.weight" if p is OTHER.weight else "", lambda _: "")
    config = StageConfig(1, 2, 0, torch.device("cpu"), borrowing=found)
    stage = Stage([layer, Uses(forward)], config, Tracker(), loss=loss)
    stage.begin(1)

    def train(count: int) -> None:
        for number in range(count):
            mb = MicroBatch(number)
            mb.value, mb.target = torch.ones(2, 3), torch.ones(2)
            stage.forward(mb)

    train(3)
    with pytest.raises(UsageError, match=r"uses the parameter 0\.weight of another"):
        train(1)


def test_a_layer_may_be_given_the_parameter_that_another_returns() -> None:
    found = Borrowing(lambda _: "0.weight", lambda _: "")
    call = found.watching("layer 1", 1, nn.Identity(), lambda x: x @ OTHER.weight.t())
    with pytest.raises(UsageError, match=r"uses the parameter 0.weight"):
        call(torch.ones(2, 3))
    call = found.watching("layer 1", 1, nn.Identity(), lambda pair: pair[0] @ pair[1].t())
    assert call((torch.ones(2, 3), OTHER.weight)).requires_grad


def test_a_parameter_that_no_known_layer_has_is_reported_once() -> None:
    origins = {id(UNKNOWN): "abc"}
    assert run(lambda x: {"x": x * UNKNOWN}, origins) == [Borrowed("layer 5 (Uses)", 5, "abc")]
    assert run(lambda x: {"x": x * UNKNOWN}) == []  # callables do not reach it


def test_the_loss_may_use_the_parameters_of_the_last_layer_alone() -> None:
    layer = nn.Linear(3, 3)
    for used, places in ((layer, {}), (OTHER, {id(OTHER.weight): "0.weight"})):
        found = Borrowing(lambda p, known=places: known.get(id(p), ""), lambda _: "")  # type: ignore[misc]
        config = StageConfig(1, 2, 0, torch.device("cpu"), borrowing=found)

        def loss(output: torch.Tensor, _: Any, used: nn.Linear = used) -> Any:
            return output.sum() + used.weight.norm()

        stage = Stage([layer], config, Tracker(), loss=loss)
        stage.begin(1)
        mb = MicroBatch(0)
        mb.value, mb.target = torch.ones(2, 3), torch.ones(2)
        if not places:
            stage.forward(mb)
            continue
        with pytest.raises(UsageError, match=r"^loss\(\): uses the parameter 0.weight of another"):
            stage.forward(mb)


class Leaves(nn.Linear):
    """A layer that leaves a part of the loss behind."""

    def __init__(self, leave: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__(3, 3)
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.leave(self, out)
        seen = getattr(self, "seen", 0.0)
        return out.tanh() + seen


KEPT: list[torch.Tensor] = []


def train(leave: Callable[[Any, torch.Tensor], Any], loss: Callable[[Any, Any], Any]) -> list[str]:
    """Return the notes on the first micro-batch."""
    found = Borrowing(lambda _: "", lambda _: "")
    config = StageConfig(0, 4, 0, torch.device("cpu"), borrowing=found)
    stage = Stage([OTHER, Leaves(leave)], config, Tracker(), loss=loss)
    stage.begin(1)
    mb = MicroBatch(0)
    mb.value, mb.target = torch.ones(2, 3), torch.ones(2)
    stage.forward(mb)
    return found.notes


@pytest.mark.parametrize(
    "leave",
    [
        lambda layer, out: setattr(layer, "kl", out.pow(2).mean()),
        lambda layer, out: setattr(layer, "parts", [{"kl": out.pow(2).mean()}]),
    ],
)
def test_a_part_of_the_loss_in_an_attribute_is_noted(leave: Any) -> None:
    (note,) = train(leave, lambda output, _: output.sum())
    assert note.startswith("layer 5 (Leaves): Leaves leaves a scalar with a graph in its attribute")


def test_a_part_of_the_loss_in_another_object_is_rejected() -> None:
    KEPT.clear()
    with pytest.raises(UsageError, match=r"^loss\(\): uses a tensor with a graph that a layer"):
        train(
            lambda _, out: KEPT.append(out.pow(2).mean()), lambda output, _: output.sum() + KEPT[0]
        )


def test_a_gradient_through_the_layers_is_rejected() -> None:
    def penalty(output: torch.Tensor, _: Any) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(output.sum(), KEPT[0], create_graph=True)
        return output.sum() + gradient.pow(2).sum()

    KEPT.clear()
    with pytest.raises(UsageError, match=r"takes a gradient through layers .* of one layer$"):
        train(lambda _, out: KEPT.append(out), penalty)


class Force(nn.Module):
    """A layer with two inputs that takes the gradient of an energy by the first one."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.own, self.of = nn.Linear(3, 3), of

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        place, hidden = self.of(pair[0]), self.own(pair[1])
        energy = (place * hidden).sum()
        return torch.autograd.grad(energy, place, create_graph=True)[0]


def run_force(before: list[nn.Module], value: Any, last: nn.Module) -> list[str]:
    """Run a stage; what arrives from another stage wants grad. Return the notes."""
    found = Borrowing(lambda _: "", lambda _: "")
    config = StageConfig(1, 4, 0, torch.device("cpu"), borrowing=found)
    stage = Stage([*before, last], config, Tracker(), loss=lambda output, _: output.sum())
    stage.begin(1)
    for number in range(2):  # both are watched
        mb = MicroBatch(number)
        mb.value, mb.target = value, torch.ones(2)
        mb.wants_grad = [True, True] if isinstance(value, tuple) else [False]
        stage.forward(mb)
        stage.backward(mb)
    return found.notes


ARRIVED = torch.ones(2, 3), torch.ones(2, 3)
BY_INPUT = r"^layer \d \(Force\): takes a gradient by one of its inputs \(torch.autograd.grad\)"


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ([Layer(lambda pair: (pair[0], pair[1] + pair[0].tanh()))], ARRIVED),
        ([nn.Linear(3, 3), Layer(lambda x: (x, x.tanh()))], torch.ones(2, 3)),
        ([Layer(lambda x: x.requires_grad_()), Layer(lambda x: (x, x.tanh()))], torch.ones(2, 3)),
    ],
)
def test_a_gradient_by_an_input_on_which_another_depends_is_rejected(
    before: list[nn.Module], value: Any
) -> None:
    with pytest.raises(UsageError, match=BY_INPUT):
        run_force(before, value, Force(lambda x: x))
    assert run_force(before, value, Force(lambda x: x.view_as(x))) == []


@pytest.mark.parametrize(
    "before", [[], [Layer(lambda pair: (pair[0], pair[1].tanh()))], [nn.Identity()]]
)
def test_a_gradient_by_an_input_on_which_another_may_depend_is_noted(
    before: list[nn.Module],
) -> None:
    (note,) = run_force(before, ARRIVED, Force(lambda x: x))
    assert re.match(BY_INPUT + ", which another stage sent; if another input depends on", note)
    assert run_force(before, ARRIVED, Force(lambda x: x.view_as(x))) == []


def by_each(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    """Take two gradients, each of a number that depends on one input alone."""
    return sum(
        (torch.autograd.grad(x.pow(2).sum(), x, create_graph=True)[0] for x in pair), pair[0]
    )


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ([nn.Linear(3, 3), Layer(lambda x: (x, x.tanh()))], torch.ones(2, 3)),
        ([], ARRIVED),
    ],
)
def test_a_gradient_that_passes_through_no_other_input_is_no_error(
    before: list[nn.Module], value: Any
) -> None:
    assert run_force(before, value, Layer(by_each)) == []


@pytest.mark.parametrize("split", [lambda x: x.chunk(2, -1), lambda x: (x[:, :3] * 2, x[:, 3:])])
def test_a_gradient_by_an_input_on_which_no_other_depends_is_no_error(split: Any) -> None:
    assert run_force([nn.Linear(3, 6), Layer(split)], torch.ones(2, 3), Force(lambda x: x)) == []


@pytest.mark.parametrize(
    "leave",
    [
        lambda layer, out: setattr(layer, "last", out.pow(2).mean().detach()),
        lambda layer, out: setattr(layer, "seen", out.sum()),  # the output depends on it
        lambda layer, out: setattr(layer, "state", out.mean(1)),  # as of a recurrent layer
    ],
)
def test_what_no_loss_needs_may_be_left_in_an_attribute(leave: Any) -> None:
    assert train(leave, lambda output, _: output.relu_().sum()) == []


def test_gradients_that_are_switched_off_are_an_error() -> None:
    with torch.no_grad(), pytest.raises(UsageError, match="has switched gradients off"):
        train(lambda *_: None, lambda output, _: output.sum())


class Balanced(nn.Module):
    """Leaves a part of the loss in a module around its units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.units[0](x)
        self.balance = x.pow(2).mean()
        return self.units[1](x)


@pytest.mark.parametrize("count", [2, 2.0, torch.tensor(6.0), torch.tensor(3)])
def test_a_count_that_is_a_whole_number_is_not_noted(count: Any) -> None:
    assert not train(lambda _, x: None, lambda output, _: (output.sum(), count))


def test_a_sum_over_no_element_is_not_noted() -> None:
    assert not train(lambda _, x: None, lambda output, _: (output.sum() * 0.0, 0))


@pytest.mark.parametrize("count", [0.75, torch.tensor(0.75), 0])
def test_a_metric_in_the_place_of_a_count_is_noted(count: Any) -> None:
    (note,) = train(lambda _, x: None, lambda output, _: (output.sum() * 0.0 + 1.5, count))
    assert f"returned the pair (1.5, {float(count):g}), which means (sum, count)" in note


def test_a_count_with_a_graph_is_an_error() -> None:
    with pytest.raises(UsageError, match="whose count has a graph, and a count has no gradient"):
        train(lambda _, x: None, lambda output, _: (output.sum(), output.mean()))


def test_a_part_of_the_loss_between_the_units_of_a_cut_module_is_noted() -> None:
    plan, layers = cut(Balanced(), (torch.ones(2, 3), torch.ones(2)))
    found = Borrowing(lambda _: "", lambda _: "")
    config = StageConfig(0, 0, 0, torch.device("cpu"), borrowing=found)
    stage = Stage(layers, config, Tracker(), loss=lambda output, _: output.sum())
    stage.begin(1)
    mb = MicroBatch(0)
    mb.value, mb.target = torch.ones(2, 3), torch.ones(2)
    stage.forward(mb)
    assert "Balanced leaves a scalar with a graph in its attribute 'balance'" in found.notes[0]
    assert plan.units == ["units.0", "units.1"]
