"""A module that stages would not compute as one process does is refused when it is cut."""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.stage.cut.calls import line_of_the_user
from pipeworker.worker.stage.cut.part import plan_of
from pipeworker.worker.transport.structure import NO_TYPES

WIDTH = 8


class Counts(nn.Module):
    """Changes a buffer outside of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.add_(1)
        return self.layers[1](self.layers[0](x))


class Assigns(Counts):
    """Assigns a buffer outside of its units."""

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return self.layers[1](self.layers[0](x))


class Fills(Counts):
    """Fills a buffer outside of its units with what a unit returns."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layers[0](x)
        self.calls.copy_(hidden.detach().mean())
        return self.layers[1](hidden)


class Views(nn.Module):
    """Changes a tensor of which another layer has a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers[0](x).clone()
        part = out[:, :2]
        other = self.layers[1](x)
        out.add_(1)
        return self.layers[2](other + part.sum() + out)


class Halved(nn.Linear):
    """Needs numbers, and returns views of the same memory."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        assert out.isfinite().all().item()
        return out, out[:, :2]


class ViewsOfUnit(Views):
    """Changes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = Halved(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        out, part = self.first(x)
        other = self.layers[1](out * self.gain)
        part.add_(1)
        return self.layers[2](other + out)


class Packs(nn.Module):
    """Packs a sequence, whose kernel reads the lengths, outside of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        sequences = self.first(x).unsqueeze(1)
        lengths = torch.ones(len(x), dtype=torch.int64)
        packed = nn.utils.rnn.pack_padded_sequence(sequences, lengths, batch_first=True)
        return self.last(packed.data)


class Opaque(nn.Linear):
    """Returns an object, as layers of flows return a distribution."""

    def forward(self, input: torch.Tensor) -> Any:
        return nn.Identity()


class Masked:
    """A tensor and its mask, in an object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.mask = tensor, tensor > 0


class ReturnsMasked(nn.Linear):
    """Returns it, as the backbone of a detector does."""

    def forward(self, input: torch.Tensor) -> Any:
        return Masked(super().forward(input))


class Flow(nn.Module):
    """Has a unit that returns an object."""

    def __init__(self, kind: type[nn.Linear] = Opaque) -> None:
        super().__init__()
        self.first = kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x)(x)


class Tries(Counts):
    """Calls a unit once more without an argument that it does not take."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            try:
                x = layer(x, lengths=None)
            except TypeError:
                x = layer(x)
        return x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Tries(), "catches the TypeError that a unit raises, at test_cut_refused.py:.*it takes"),
        (Flow(), "first: returns or is called with an Identity, of which a pipeline cannot tell"),
        (Flow(ReturnsMasked), "a Masked, of .* holds; register it .*register_pytree_node.*, or"),
        (Counts(), "its forward changes the buffer 'calls' outside of the modules"),
        (Assigns(), "its forward changes the buffer 'calls' outside of the modules"),
        (Fills(), "its forward changes the buffer 'calls' outside of the modules"),
        (Views(), "changes a tensor in place at .*, of which another layer has"),
        (ViewsOfUnit(), "changes a tensor in place at .*, of which another layer has"),
        (nn.ReLU(), "its forward calls no module with parameters"),
        (Packs(), r"layer 1 \(behind first\): .* depends on the numbers of an activation"),
    ],
)
def test_what_cannot_be_cut_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(module, NO_TYPES, torch.randn(2, WIDTH))


class Keeping(nn.Module):
    """A unit that keeps a value in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        out = torch.tanh(self.linear(x))
        self.kept = out.mean()
        return out


class KeepingByNumbers(Keeping):
    """One that runs on numbers, because it needs them, and that makes the attribute."""

    def __init__(self) -> None:
        super().__init__()
        del self.kept

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out if out.sum() > 0 else out * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class Popping(nn.Module):
    """A unit that takes values out of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, values: list[torch.Tensor]) -> Any:
        return self.scale * self.linear(x + values.pop())


class Applying(nn.Module):
    """A unit that calls a module that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, module: nn.Module) -> Any:
        return self.scale * module(self.linear(x))


class Remembering(nn.Module):
    """A unit that uses what an object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, held: Any) -> Any:
        return self.scale * self.linear(x) + held.memory


class Any3(nn.Module):
    """Three layers, a batch norm, and a forward that is given."""

    def __init__(self, way: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kept = nn.ModuleList(Keeping() for _ in range(2))
        self.pop, self.apply_it, self.remember = Popping(), Applying(), Remembering()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, x)


def kept(m: Any, x: torch.Tensor) -> Any:
    return m.l[0](m.kept[1](m.kept[0](x))) + m.kept[0].kept


def function(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](Square.apply(m.l[0](x)))  # type: ignore[no-untyped-call]


def checkpointed(m: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(m.l[1], m.l[0](x), use_reentrant=False)


def decided_by_a_buffer(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](m.l[0](x)) if m.mean.sum() > 1 else m.l[0](x)


def statistics(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](m.norm(m.l[0](x)) - m.norm.running_mean)


def filled_by_a_view(m: Any, x: torch.Tensor) -> Any:
    out = torch.zeros(len(x), WIDTH)
    hidden = m.l[0](x)
    out[:, 0].copy_(hidden[:, 0])
    return m.l[1](hidden) + out


def filled_by_a_norm(m: Any, x: torch.Tensor) -> Any:
    mean = torch.zeros(WIDTH)
    hidden = F.batch_norm(m.l[0](x), mean, torch.ones(WIDTH), training=True)
    return m.l[1](hidden) + mean


def filled_together(m: Any, x: torch.Tensor) -> Any:
    hidden, copies = m.l[0](x), [torch.zeros(len(x), WIDTH)]
    with torch.no_grad():
        torch._foreach_copy_(copies, [hidden])
    return m.l[1](hidden) + copies[0]


def filled_by_name(m: Any, x: torch.Tensor) -> Any:
    hidden, found = m.l[0](x), (torch.zeros(len(x)), torch.zeros(len(x), dtype=torch.int64))
    with torch.no_grad():
        torch.max(hidden, 1, out=found)
    return m.l[1](hidden) + found[0][:, None]


def statistics_outside(m: Any, x: torch.Tensor) -> Any:
    hidden = F.batch_norm(m.l[0](x), m.mean, torch.ones(WIDTH), training=True)
    return m.l[1](hidden) + m.mean


def resized(m: Any, x: torch.Tensor) -> Any:
    hidden, total = m.l[0](x), torch.empty(0)
    torch.sum(hidden.detach(), 1, keepdim=True, out=total)
    return m.l[1](hidden) + total


def in_place(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    view = hidden[:, :4]
    other = m.l[1](hidden.clone())
    F.relu(hidden, inplace=True)
    return m.l[2](hidden + other) + view.sum()


def averaged(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    with torch.no_grad():
        m.l[2].weight.mul_(0.9).add_(m.l[0].weight, alpha=0.1)
    return m.l[2](hidden)


def clamped(m: Any, x: torch.Tensor) -> Any:
    m.l[0].weight.data.clamp_(-1, 1)
    return m.l[0](x)


def averaged_together(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    with torch.no_grad():
        torch._foreach_lerp_(list(m.l[2].parameters()), list(m.l[0].parameters()), 0.1)
    return m.l[2](hidden)


def reshaped(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x).clone()
    hidden.unsqueeze_(1)
    return m.l[1](hidden)


def freezing(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[1](m.l[0](x))
    m.l[1].requires_grad_(requires_grad=False)
    return m.l[1](hidden)


def frozen_by_an_attribute(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    m.l[2].bias.requires_grad = False
    return m.l[2](hidden)


def given(m: Any, x: torch.Tensor) -> Any:
    return m.apply_it(m.l[0](x), m.l[1])


def iterated(m: Any, x: torch.Tensor) -> Any:
    return m.apply_it(m.l[0](x), iter([torch.tanh]))


def drawn(m: Any, x: torch.Tensor) -> Any:
    chances = torch.sigmoid(m.l[0](x))
    return m.l[1](torch.bernoulli(chances, generator=torch.Generator()))


def popped(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.pop(m.l[1](hidden), [hidden])


def hooked_late(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    other = m.l[1](hidden)
    hidden.register_hook(lambda grad: grad * 2)
    return m.l[2](other + hidden)


def hooked_behind_its_layer(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x) * 2
    other = m.l[1](hidden)
    hidden.register_hook(lambda grad: grad.clamp(-1, 1))
    return m.l[2](other) + hidden


def hooked_by_a_closure(m: Any, x: torch.Tensor) -> Any:
    factor = torch.sigmoid(m.l[0](x))
    hidden = m.l[1](x)
    hidden.register_hook(lambda grad: grad * factor)
    return m.l[2](hidden)


def held_by_an_object(m: Any, x: torch.Tensor) -> Any:
    held = SimpleNamespace(memory=m.l[0](x))
    return m.remember(m.l[1](x), held)


def inferred(m: Any, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        factor = m.l[0](x)
    return m.l[1](x) * factor.clone()


def differentiated(m: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    energy = m.l[1](torch.tanh(m.l[0](x))).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def trained(m: Any, x: torch.Tensor) -> Any:
    m.l[0](x).sum().backward()
    return m.l[1](x)


def distributed(m: Any, x: torch.Tensor) -> Any:
    return torch.distributions.Normal(m.l[0](x), 1.0, validate_args=True).rsample()


def wrapped(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    try:
        return m.l[1](hidden.unsqueeze_(0))
    except Exception as error:
        raise RuntimeError("it failed") from error


def branching(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.l[1](hidden) if bool((hidden > 0).any()) else m.l[2](hidden)


def selecting(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.l[1](hidden[hidden[:, 0] > 0])


def as_an_array(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.l[1](hidden) + torch.from_numpy(hidden.detach().numpy() * 2)


def replaced(m: Any, x: torch.Tensor) -> Any:
    halves = {name: p * 0.5 for name, p in m.l[1].named_parameters()}
    return torch.func.functional_call(m.l[1], halves, (m.l[0](x),))


def exchanged(m: Any, x: torch.Tensor) -> Any:
    others = dict(m.l[2].named_parameters())
    return torch.func.functional_call(m.l[1], others, (m.l[0](x),))


_tanh = torch.jit.script(nn.Tanh())


def scripted(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](_tanh(m.l[0](x)))


def mapped(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](torch.func.vmap(torch.tanh)(m.l[0](x)))


def mapped_around(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](torch.func.vmap(m.l[0])(x))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (kept, "uses a tensor that a unit keeps in an attribute"),
        (function, "calls the autograd.Function Square between its layers"),
        (checkpointed, "makes a checkpoint"),
        (decided_by_a_buffer, "depends on the numbers of a buffer"),
        (statistics, "uses the buffer 'norm.running_mean' outside"),
        (filled_by_a_view, "fills a tensor that is a view or has one"),
        (filled_by_a_norm, "has batch_norm fill a tensor with numbers of an activation"),
        (filled_together, "has _foreach_copy_ fill a tensor with numbers"),
        (filled_by_name, "has max fill a tensor with numbers"),
        (statistics_outside, "has batch_norm fill a tensor with numbers"),
        (resized, "has a function resize its argument `out`"),
        (in_place, "changes a tensor in place"),
        (averaged, "changes the parameter 'l.2.weight'"),
        (averaged_together, "changes the parameter 'l.2.weight'"),
        (clamped, "changes the parameter 'l.0.weight'"),
        (reshaped, "calls unsqueeze_ on an activation"),
        (
            freezing,
            r"calls requires_grad_ on the parameter 'l.1.weight', at .*; do it in model\(\)",
        ),
        (frozen_by_an_attribute, "sets an attribute of the parameter 'l.2.bias'"),
        (given, "calls a unit with a module"),
        (iterated, "calls a function or a module with a list_iterator"),
        (drawn, "calls a function or a module with a Generator"),
        (popped, "removes what is in a list"),
        (hooked_late, "registers a hook on a tensor that an earlier layer has used"),
        (hooked_behind_its_layer, "registers a hook on a tensor that an earlier layer has used"),
        (hooked_by_a_closure, "registers a hook that holds an activation"),
        (held_by_an_object, "with an object that holds an activation, which the unit uses"),
        (inferred, "calls layers in torch.inference_mode"),
        (differentiated, "takes a gradient through its layers, at test_cut_refused.py"),
        (trained, "takes a gradient through its layers, at test_cut_refused.py"),
        (wrapped, "calls unsqueeze_ on an activation, at test_cut_refused.py"),
        (distributed, "at test_cut_refused.py:.* a distribution without validate_args=False"),
        (branching, "depends on the numbers of an activation, at test_cut_refused.py"),
        (selecting, "depends on the numbers of an activation, at test_cut_refused.py"),
        (as_an_array, "depends on the numbers of an activation, at test_cut_refused.py"),
        (replaced, "replaces the parameters of a unit"),
        (exchanged, "replaces the parameters of a unit"),
        (scripted, "calls a function or a module of TorchScript between its layers, at test_cut_r"),
        (mapped, "or that a transform as vmap or a compiled function makes"),
        (mapped_around, "is within a transform of torch.func"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_stages_would_compute_otherwise_is_refused(way: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(Any3(way), NO_TYPES, torch.randn(4, WIDTH))


def test_a_line_of_code_without_a_file_is_named_as_such() -> None:
    made: dict[str, Any] = {}
    exec("def way(m, x):\n    hidden = m.l[0](x)\n    assert hidden.sum().item() > 0\n", made)
    line = r"at line 3 of code that has no file \(<string>, in way\): an if"
    with pytest.raises(UsageError, match=r"^layer 1 \(.*\): .* " + line):
        plan_of(Any3(made["way"]), NO_TYPES, torch.randn(4, WIDTH))


def test_a_line_of_no_user_is_not_that_of_the_process() -> None:
    """The outermost frame is the command of the process; here it is the first of a thread."""
    found, noted = list[str](), Event()

    def outermost() -> None:
        found.append(line_of_the_user())
        noted.set()

    start_new_thread(outermost, ())
    assert noted.wait(20)
    assert found == ["an unknown line"]


def test_a_unit_that_needs_numbers_keeps_a_value_too() -> None:
    module = Any3(kept)
    module.kept[0] = KeepingByNumbers()
    with pytest.raises(UsageError, match="uses a tensor that a unit keeps in an attribute"):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))


class Squared(nn.Module):
    """A unit that calls an autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return Square.apply(self.linear(x)) + self.bias  # type: ignore[no-untyped-call]


def test_a_function_within_a_unit_is_no_reason_to_refuse() -> None:
    module = Any3(lambda m, x: m.l[1](m.squared(m.l[0](x))))
    module.squared = Squared()
    plan = plan_of(module, NO_TYPES, torch.randn(4, WIDTH))
    assert plan.units == ["l.0", "squared", "l.1"]


class OfFixedSize(nn.Module):
    """A network whose forward has the size of the mini-batch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).view(8, -1))
        return out


def test_an_error_of_forward_shows_the_samples_of_the_micro_batch() -> None:
    message = (
        r"in layer 1 \(behind first\), on a micro-batch of 2 samples without numbers, raised Run"
    )
    with pytest.raises(UserCodeError, match=message):
        plan_of(OfFixedSize(), NO_TYPES, torch.zeros(2, 3))


@pytest.mark.parametrize("holds", [lambda bias: bias.data, lambda bias: {"all": [bias.detach()]}])
@pytest.mark.parametrize("place", ["", "l.2"])
def test_a_tensor_in_the_memory_of_a_parameter_of_another_unit_is_refused(
    holds: Callable[[Any], Any], place: str
) -> None:
    module = Any3(lambda m, x: m.l[2](m.l[1](m.l[0](x))))
    module.l[0].seen = holds(module.l[0].bias)  # its own unit
    assert len(plan_of(module, NO_TYPES, torch.randn(4, WIDTH))) == 3
    module.get_submodule(place).seen = holds(module.l[0].bias)
    with pytest.raises(UsageError, match=r"seen' has the memory of the parameter 'l\.0\.bias'"):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))
