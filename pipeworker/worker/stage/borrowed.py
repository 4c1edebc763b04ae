"""Parameters and results of other layers that the forward of a layer, or the loss, uses.

Code reaches such a parameter by a global variable, a closure or an object. Where another stage has
the layer, the stage of the user has a copy of the parameter, which no optimizer updates. The graph
of a micro-batch shows the parameters that a layer uses. The first one shows nearly all mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Borrowed
from pipeworker.plan.ties import LOSS, MODEL, used_elsewhere
from pipeworker.worker.internals import AccumulateGrad, current_backward, sequence_of
from pipeworker.worker.stage import losses
from pipeworker.worker.stage.slots import OF_EVERY_MODULE
from pipeworker.worker.stage.values import distinct_tensors

TextOf = Callable[[nn.Parameter], str]
"""Returns a text about a parameter, or ""."""


@dataclass(slots=True)
class Borrowing:
    """Looks for parameters that a layer uses and does not have.

    Attributes:
        place_of: returns the name of a parameter that a layer known to this process has.
        origin_of: returns the origin of a parameter that callables reach.
        found: used parameters of no known layer; the layer of another process may have them.
        notes: hints for the user about scalars that the first forward of a layer leaves in
            attributes, and the loss.
    """

    place_of: TextOf
    origin_of: TextOf
    found: list[Borrowed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _known: set[tuple[str, int]] = field(default_factory=set)
    """The users that were watched before, with the index of the layer."""
    _noted: set[str] = field(default_factory=set)

    def watching(
        self, user: str, index: int, layer: nn.Module, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return `call` as a function that looks for what it uses besides the layer's parameters.

        Args:
            user: what errors call it.
            index: the index of the layer in the model.
            layer: the layer; the last one for the loss; all of the stage for a module that is cut.
            call: the layer's forward, the loss, or the stage's part of the module's forward.

        Raises:
            UsageError: as the function is called, if another layer of this process has a parameter,
                or if the loss uses what a forward has left behind.
        """

        def watched(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                raise UsageError(
                    "the job file has switched gradients off (torch.set_grad_enabled(False)); use "
                    "torch.no_grad() where none are needed"
                )
            begin = sequence_of(torch.ones((), device="cpu", requires_grad=True).clone().grad_fn)
            before = {tensor.grad_fn for tensor in distinct_tensors(args)}
            is_layer = user not in (LOSS, MODEL)
            output = (self.checking_gradients(user, call) if is_layer else call)(*args)
            given = distinct_tensors(args)  # a layer may return a parameter of its own
            own = {id(parameter) for parameter in (*layer.parameters(), *given)}
            nodes, older = _graph(distinct_tensors(output), begin)
            if user == LOSS and older - before:
                raise UsageError(
                    "loss(): uses a tensor with a graph that a layer has left behind, or takes a "
                    "gradient through layers (torch.autograd.grad); with several stages it could "
                    "not. Return the tensor with the output of the layer; take the gradient in the "
                    "forward of one layer"
                )
            if (user, index) not in self._known:
                self._known.add((user, index))
                if user == LOSS:
                    self.notes += losses.notes_on(output)
                else:
                    self.notes += _left_in_attributes(user, layer, nodes, begin)
            for parameter in _leaves(nodes):
                if id(parameter) in own:
                    continue
                if place := self.place_of(parameter):
                    raise used_elsewhere(user, place)
                if origin := self.origin_of(parameter):
                    use = Borrowed(user, index, origin)
                    if use not in self.found:
                        self.found.append(use)
            return output

        return watched

    def checking_gradients(self, user: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's `call` as a function that refuses a gradient that depends on the stages.

        A forward may take the gradient by one of its inputs, and this may pass through another
        input that depends on the first one. The gradient then passes through earlier layers, of
        which a stage has only its own. Whether inputs from another stage depend on each other is
        unknown here, so a note is added for these. `user` is what messages call the layer.

        Raises:
            UsageError: as the function is called.
        """

        def checked(*args: Any, **kwargs: Any) -> Any:
            inputs = [t for t in distinct_tensors((args, kwargs)) if t.requires_grad]
            if len(inputs) < 2:
                return call(*args, **kwargs)
            edges = [get_gradient_edge(tensor) for tensor in inputs]  # before a change in place
            reached: dict[int, set[int]] = {}  # inputs, by the backward that computed a gradient

            def hook(number: int, gradient: torch.Tensor | None) -> None:
                if gradient is not None:  # else the gradient is of another output of the same node
                    reached.setdefault(current_backward(), set()).add(number)

            hooks: list[Any] = [
                tensor.register_hook(partial(hook, number))  # type: ignore[no-untyped-call]
                for number, tensor in enumerate(inputs)
            ]
            try:
                output = call(*args, **kwargs)
            finally:
                for handle in hooks:
                    handle.remove()
            for numbers in reached.values():
                for through, by in permutations(numbers, 2):
                    self._check_gradient(user, edges[through], edges[by])
            return output

        return checked

    def _check_gradient(self, user: str, through: GradientEdge, by: GradientEdge) -> None:
        """Check a gradient by an input that may have passed through another one."""
        met = _outputs_met(through, by.node)
        taken = f"{user}: takes a gradient by one of its inputs (torch.autograd.grad)"
        if by.output_nr in met:
            raise UsageError(
                f"{taken}, and another input depends on that one by earlier layers, which other "
                "stages may have. For the part of the gradient within the layer, compute with "
                "x.view_as(x) and take it by that; for the whole, have one layer do it all"
            )
        if met and by.node.name() == "_BoundaryBackward":
            note = (
                f"{taken}, which another stage sent; if another input depends on that one, the "
                "gradient lacks the part by earlier layers: have one layer do it all"
            )
            if note not in self._noted:
                self._noted.add(note)
                self.notes.append(note)


def _outputs_met(start: GradientEdge, node: Any) -> set[int]:
    """Return the numbers of a node's outputs at which a backward from an edge arrives."""
    waiting: list[tuple[Any, int]] = [(start.node, start.output_nr)]
    seen: set[Any] = set()
    met: set[int] = set()
    while waiting:
        current, number = waiting.pop()
        if current is node:
            met.add(number)
        elif current is not None and current not in seen:
            seen.add(current)
            waiting += current.next_functions
    return met


def _graph(tensors: Iterable[torch.Tensor], begin: int) -> tuple[set[Any], set[Any]]:
    """Return the nodes that tensors depend on: those made after `begin`, and where these end."""
    waiting = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    older: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if sequence_of(node) < begin:
            older.add(node)
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return seen, older


def _leaves(nodes: Iterable[Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters to whose gradients nodes add."""
    for node in nodes:
        if isinstance(node, AccumulateGrad):
            leaf = node.variable  # type: ignore[attr-defined]
            if isinstance(leaf, nn.Parameter):
                yield leaf


def _left_in_attributes(
    user: str, layer: nn.Module, nodes: Collection[Any], begin: int
) -> Iterator[str]:
    """Yield notes on scalars that a forward leaves in attributes, and that its output ignores.

    Such a scalar may be a part of the loss, which another stage could not have.
    """
    for module in layer.modules():
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE or not isinstance(value, (torch.Tensor, list, tuple, dict)):
                continue
            for node in (t.grad_fn for t in distinct_tensors(value) if not t.dim()):
                if node is not None and node not in nodes and sequence_of(node) >= begin:
                    yield (
                        f"{user}: {type(module).__name__} leaves a scalar with a graph in its "
                        f"attribute {name!r}; if it is a part of the loss, return it with the "
                        "output, since the loss is computed apart from the layer; else detach() it"
                    )
