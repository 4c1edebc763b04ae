"""A stage's backward in two parts: the gradients of its input first, those of its weights later.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) send on the first part's result at once and
fill idle time with the second part. The bits are those of one backward: of the nodes that are ready
the engine takes the one made last, so that what a call leaves out does not reorder the rest.

A node is *through* if an input can be reached from it. A *source* is through and also leads past
the inputs to a leaf. The first part makes only the gradients that lead to the inputs; the second
enters the graph again at the sources, with the gradients that arrived there. Leaves that share a
source, or a node behind one, are a group: one call of the engine. A group is *early*, made in the
first part and only accumulated in the second, if
 - a source leads to another (a weight used twice in a chain), and so would repeat the chain;
 - a source is a user's autograd.Function, which makes all gradients in one call, may communicate,
   and may be what fires the hooks of a module;
 - hooks unpack what a node saved: torch.utils.checkpoint would recompute once for each group.

Two things are not as in one backward: all that the graph saved is kept until the second part, and a
hook on a tensor that a source made fires in both parts, each time given the same gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipeworker.worker.internals import SAVED_PREFIX, AccumulateGrad, engine
from pipeworker.worker.stage import offload

_Edges = tuple[tuple[Node | None, int], ...]


@dataclass(slots=True)
class _Group:
    """Leaves, and where the engine enters the graph for their gradients."""

    leaves: list[GradientEdge] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class Deferred:
    """The second part: it accumulates the gradients of the weights."""

    def __init__(self, groups: list[_Group], early: list[tuple[Any, Tensor]]) -> None:
        self._groups = groups
        self._early = early

    def run(self, call: Callable[..., Any] = engine) -> None:
        """Accumulate into ``.grad`` and let go of the graph. A second call does nothing.

        Args:
            call: calls the engine, which runs the nodes of layers and the user's.
        """
        with torch.no_grad():
            while self._early:
                accumulate, gradient = self._early.pop()
                accumulate(gradient)
        while self._groups:
            group = self._groups.pop()
            edges, gradients, leaves = group.edges, group.gradients, group.leaves
            if edges:
                call(tuple(edges), tuple(gradients), False, False, tuple(leaves), True, True)


def backward_input(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    call: Callable[..., Any] = engine,
) -> tuple[list[Tensor | None], Deferred]:
    """Run the first part.

    Args:
        roots: tensors that require grad.
        gradients: of the roots, in their shapes. Some are kept, not copied, until the second part
            has run, and so are some of those returned: they must not change before.
        inputs: where the graph is cut. One that a layer may change in place is given as the
            :func:`torch.autograd.graph.get_gradient_edge` it had before. Nothing behind the nodes
            that made them is reached; no other input may lie there.
        call: calls the engine, which runs the nodes of layers and the user's.

    Returns:
        The gradients of the inputs, None for an unused one, and the second part.

    Raises:
        RuntimeError: from torch, for a reentrant checkpoint, which knows only whole backwards.
    """
    starts = [get_gradient_edge(root) for root in roots]
    wanted = [i if isinstance(i, GradientEdge) else get_gradient_edge(i) for i in inputs]
    graph = _Graph(starts, {edge.node for edge in wanted})
    if not graph.through:  # One group without leaves, which the engine takes for all of them.
        return [None] * len(wanted), Deferred([_Group([], starts, list(gradients))], [])
    early = graph.early()
    groups: dict[int | None, _Group] = {}
    at_once: list[GradientEdge] = []
    for leaf in graph.leaves:
        number = graph.group(leaf)
        into = at_once if number in early else groups.setdefault(number, _Group()).leaves
        into.append(GradientEdge(leaf, 0))
    caught = [edge for edge in graph.arrivals(starts) if graph.group(edge.node) in groups]
    asked = (*wanted, *at_once, *caught)
    # A source's gradient is caught before the hooks of its tensor, which the second part will fire
    # again; that of an input or a leaf after them.
    found = call(tuple(roots), tuple(gradients), bool(groups), False, asked, True, False)
    entries = [e for e in zip(starts, gradients, strict=True) if e[0].node not in graph.through]
    entries += zip(caught, found[len(wanted) + len(at_once) :], strict=True)
    for edge, gradient in entries:
        group = groups.get(graph.group(edge.node))
        if group is not None and gradient is not None:
            group.edges.append(edge)
            group.gradients.append(gradient)
    ready = zip(at_once, found[len(wanted) :], strict=False)
    left = Deferred(list(groups.values()), [(e.node, g) for e, g in ready if g is not None])
    return list(found[: len(wanted)]), left


class _Graph:
    """What one walk from the roots to the inputs and leaves tells.

    Attributes:
        through: the edges of the nodes that are, a node after those it leads to.
        leaves: what accumulates the gradients of parameters and other leaves.
    """

    def __init__(self, starts: Sequence[GradientEdge], cut: set[Node]) -> None:
        self.through: dict[Node, _Edges] = {}
        self.leaves: list[Node] = []
        self._groups: dict[Node, int] = {}
        self._parents: list[int] = []  # Of a group, the one it was united with.
        seen: dict[Node, _Edges] = {}
        left: set[Node] = set()
        stack = [start.node for start in starts]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen[node] = edges = () if node in cut else node.next_functions
                stack.append(node)
                stack += [child for child, _ in edges if child is not None and child not in seen]
            elif node not in left:
                left.add(node)
                self._leave(node, seen[node], node in cut)

    def _leave(self, node: Node, edges: _Edges, through: bool) -> None:
        """Everything that `node` leads to has been left."""
        found = None
        if type(node) is AccumulateGrad and not through:
            found = len(self._parents)
            self._parents.append(found)
            self.leaves.append(node)
        for child, _ in edges:
            if child in self.through:
                through = True
            elif child in self._groups:
                other = self._find(self._groups[child])
                if found is not None:
                    self._parents[found] = other
                found = other
        if found is not None:
            self._groups[node] = found
        if through:
            self.through[node] = edges

    def _find(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = number = self._parents[self._parents[number]]
        return number

    def group(self, node: Node) -> int | None:
        """The group of a leaf, a source, or a node behind one; None for others."""
        number = self._groups.get(node)
        return None if number is None else self._find(number)

    def arrivals(self, starts: Sequence[GradientEdge]) -> list[GradientEdge]:
        """Each edge to a source, once."""
        ends = [(start.node, start.output_nr) for start in starts]
        ends += [(node, nr) for edges in self.through.values() for node, nr in edges if node]
        sources = self.through.keys() & self._groups.keys()
        return [GradientEdge(node, nr) for node, nr in dict.fromkeys(ends) if node in sources]

    def early(self) -> set[int | None]:
        """The groups that are."""
        sources = {node: self._find(g) for node, g in self._groups.items() if node in self.through}
        early = {self.group(node) for node in self._groups if _unpacked_by_hook(node)}
        early |= {g for node, g in sources.items() if isinstance(node, BackwardCFunction)}
        shared = {g for g, count in Counter(sources.values()).items() if count > 1} - early
        below: dict[Node | None, int] = {}  # The shared groups with a source there, as bits.
        for node, edges in self.through.items() if shared else ():
            bits = 0
            for child, _ in edges:
                bits |= below.get(child, 0)
            number = sources.get(node)
            if number is not None and number in shared:
                if bits >> number & 1:
                    early.add(number)
                bits |= 1 << number
            below[node] = bits
        return early


def _unpacked_by_hook(node: Node) -> bool:
    """Whether hooks bring back something that the node saved."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            hook = getattr(one, "unpack_hook", None)
            if hook is not None and hook is not offload.unpack:  # which may be called again
                return True
    return False


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(SAVED_PREFIX))
