"""Parameters that the forward of a layer uses, or the loss, and that another layer has.

Code reaches such a parameter by a global variable, a closure or an object. Where another stage has
the layer, the stage of the user has a copy of the parameter, which no optimizer updates. The graph
of the first micro-batch shows the parameters that a layer uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeworker.facts.connections import Borrowed
from pipeworker.plan.ties import used_elsewhere
from pipeworker.worker.internals import AccumulateGrad, sequence_of
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
    """

    place_of: TextOf
    origin_of: TextOf
    found: list[Borrowed] = field(default_factory=list)

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
            UsageError: as the function is called, if another layer of this process has a parameter.
        """

        def watched(*args: Any) -> Any:
            begin = sequence_of(torch.ones((), requires_grad=True).clone().grad_fn)
            output = call(*args)
            given = distinct_tensors(args)  # a layer may return a parameter of its own
            own = {id(parameter) for parameter in (*layer.parameters(), *given)}
            for parameter in _leaves(output, begin):
                if id(parameter) in own:
                    continue
                if place := self.place_of(parameter):
                    raise used_elsewhere(user, place)
                if origin := self.origin_of(parameter):
                    self.found.append(Borrowed(user, index, origin))
            return output

        return watched


def _leaves(value: Any, begin: int) -> Iterator[nn.Parameter]:
    """Yield the parameters that a value depends on by nodes which were made after `begin`."""
    waiting = [tensor.grad_fn for tensor in distinct_tensors(value)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or sequence_of(node) < begin:
            continue
        seen.add(node)
        if isinstance(node, AccumulateGrad):
            leaf = node.variable  # type: ignore[attr-defined]
            if isinstance(leaf, nn.Parameter):
                yield leaf
        waiting += [following for following, _ in node.next_functions]
