"""Split backward: the gradients of a stage's input first, those of its weights later.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) send the result of the first part at once
and fill idle time with the second part. The bits are those of one backward: of the nodes that are
ready the engine takes the one created last, so nodes that a call leaves out do not reorder the
rest.

A node is *through* if an input can be reached from it. A *source* is through and also leads past
the inputs to a leaf. The first part computes only the gradients that lead to the inputs; the second
part enters the graph again at the sources, with the gradients that arrived there. Leaves that share
a source, or a node behind one, are a group: one call of the engine. A group is *early*, computed in
the first part and only accumulated in the second, if
 - a source leads to another source (a weight used twice in a chain), and so would repeat the chain;
 - a source is a user's autograd.Function, which computes all gradients in one call, may
   communicate, and may be the node that fires the hooks of a module;
 - a source is a group norm, whose kernel crashes on a CPU if its input is in channels-last format
   and it is to compute the gradients of the weights alone;
 - hooks unpack what a node saved: torch.utils.checkpoint would recompute once for each group.

Two things differ from one backward: everything that the graph saved is kept until the second part,
and a hook on a tensor that a source created fires in both parts, each time with the same gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipeworker.worker.internals import AccumulateGrad, engine
from pipeworker.worker.stage.offload import Packed
from pipeworker.worker.stage.saved_buffers import saved_by

_Edges = tuple[tuple[Node | None, int], ...]


@dataclass(slots=True)
class _Group:
    """Leaves, and the edges at which the engine enters the graph for their gradients."""

    leaves: list[GradientEdge] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class DeferredBackward:
    """The second part of a backward: the gradients of the weights.

    `early` has accumulators of leaves, and their gradients, which the first part computed.
    """

    groups: list[_Group]
    early: list[tuple[Any, Tensor]] = field(default_factory=list)

    def run(self, call: Callable[..., Any] = engine) -> None:
        """Accumulate into ``.grad`` and free the graph. A second call does nothing."""
        with torch.no_grad():
            while self.early:
                accumulate, gradient = self.early.pop()
                accumulate(gradient)
        while self.groups:
            group = self.groups.pop()
            if edges := tuple(group.edges):
                call(edges, tuple(group.gradients), False, False, tuple(group.leaves), True, True)


def backward_input(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    call: Callable[..., Any] = engine,
) -> tuple[list[Tensor | None], DeferredBackward]:
    """Run the first part: return the gradients of the inputs, and the second part.

    Some of the given and returned gradients are kept uncopied until the second part has run: they
    must not change before. The gradient of an unused input is None. The graph is cut at the inputs:
    none may lie behind another. An input that a layer may change in place is passed as its earlier
    :func:`torch.autograd.graph.get_gradient_edge`. `call` calls the autograd engine.

    Raises:
        RuntimeError: torch raised it: a reentrant checkpoint supports only whole backwards.
    """
    starts = [get_gradient_edge(root) for root in roots]
    wanted = [i if isinstance(i, GradientEdge) else get_gradient_edge(i) for i in inputs]
    graph = _Graph(starts, {edge.node for edge in wanted})
    if not graph.through:  # One group without leaves: the engine takes that for all leaves.
        return [None] * len(wanted), DeferredBackward([_Group([], starts, list(gradients))])
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
    left = DeferredBackward(list(groups.values()), [(e.node, g) for e, g in ready if g is not None])
    return list(found[: len(wanted)]), left


class _Graph:
    """The result of one walk from the roots to the leaves and the inputs, which `cut` created.

    Attributes:
        through: edges by node that is through, each node after those it leads to.
        leaves: nodes that accumulate the gradients of parameters and other leaves.
    """

    def __init__(self, starts: Sequence[GradientEdge], cut: set[Node]) -> None:
        self.through: dict[Node, _Edges] = {}
        self.leaves: list[Node] = []
        self._groups: dict[Node, int] = {}
        self._parents: list[int] = []  # By group, the group it was united with.
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
        """Classify a node after all nodes that it leads to."""
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
        """Return the group of a leaf, a source, or a node behind one; None for others."""
        number = self._groups.get(node)
        return None if number is None else self._find(number)

    def arrivals(self, starts: Sequence[GradientEdge]) -> list[GradientEdge]:
        """Return each edge to a source, once."""
        ends = [(start.node, start.output_nr) for start in starts]
        ends += [(node, nr) for edges in self.through.values() for node, nr in edges if node]
        sources = self.through.keys() & self._groups.keys()
        return [GradientEdge(node, nr) for node, nr in dict.fromkeys(ends) if node in sources]

    def early(self) -> set[int | None]:
        """Return the groups that are early."""
        sources = {node: self._find(g) for node, g in self._groups.items() if node in self.through}
        early = {self.group(node) for node in self._groups if _unpacked_by_hook(node)}
        early |= {g for node, g in sources.items() if _computes_all(node)}
        shared = {g for g, count in Counter(sources.values()).items() if count > 1} - early
        # By node, the shared groups with a source behind it, as bits.
        below: dict[Node | None, int] = {}
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


def _computes_all(node: Node) -> bool:
    """Return whether a node is to compute the gradients of its inputs and weights in one call."""
    return isinstance(node, BackwardCFunction) or node.name() == "NativeGroupNormBackward0"


def _unpacked_by_hook(node: Node) -> bool:
    """Return whether hooks unpack something that the node saved."""
    hooks = (getattr(one, "unpack_hook", None) for one in saved_by(node))
    # Our own hook may be called again.
    return any(hook is not None and hook is not Packed.unpack for hook in hooks)
