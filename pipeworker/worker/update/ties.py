"""Tied weights: one parameter at several places, on one stage or on several.

Each place has a parameter object and a gradient of its own, whether or not places share a stage, so
that what is added to what does not depend on the grouping: micro-batches at each place first, then
the places in model order. On one stage the objects share their memory. Where places are on several
stages, the stages tell each other the gradients at the end of a step, and each makes the same
update to its own copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job.file import Entry
from pipeworker.plan.ties import Tie, layer_of
from pipeworker.worker.internals import move_hooks

_FRAME = 64
"""Gradients that are sent at once."""
Build = Callable[[int], nn.Module]


def shared_parameters(entries: Sequence[Entry]) -> list[list[str]]:
    """The names of parameters that are one object in several layers."""
    places: dict[int, list[str]] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, nn.Module):
            for name, parameter in entry.named_parameters():
                places.setdefault(id(parameter), []).append(f"{index}.{name}")
    return [names for names in places.values() if len(names) > 1]


def separate(entry: nn.Module, names: Iterable[str]) -> nn.Module:
    """A copy of a layer whose parameters of these names are objects of their own.

    They share memory with the original's; whatever else holds numbers is the original's.
    """
    parameters = dict(entry.named_parameters())
    memo = {id(t): t for t in (*entry.parameters(), *entry.buffers())}
    for name in names:
        memo[id(parameters[name])] = _alias(parameters[name])
    return copy.deepcopy(entry, memo)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)  # marks that an optimizer may look at
    move_hooks(parameter, alias)
    return alias


@dataclass(slots=True)
class _Group:
    """A tie as one stage sees it."""

    tie: Tie
    mine: dict[int, nn.Parameter]  # by place
    total: torch.Tensor | None = None

    @property
    def owner(self) -> nn.Parameter:
        """The one that the stage's optimizer updates."""
        return self.mine[min(self.mine)]


@dataclass(slots=True)
class Ties:
    """The ties that have a place on a stage.

    Args:
        layers: of the stage, by index in the model.
        build: builds any layer of the model, for the values of a first place elsewhere.
        held: the stages of this worker.

    Raises:
        UsageError: a name is not a parameter's, or shapes differ.
    """

    stage: int
    ties: Sequence[Tie]
    layers: Mapping[int, nn.Module]
    build: Build
    held: Collection[int] = ()
    _groups: list[_Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        for tie in self.ties:
            mine = {
                place: _parameter(self.layers[layer_of(name)], name)
                for place, (name, stage) in enumerate(zip(tie.names, tie.stages, strict=True))
                if stage == self.stage
            }
            group = _Group(tie, mine)
            self._adopt(group)
            self._groups.append(group)

    def _adopt(self, group: _Group) -> None:
        """Give every place the value of the first one."""
        names, owner = group.tie.names, group.owner
        if 0 not in group.mine:
            origin = _parameter(self.build(layer_of(names[0])), names[0])
            _check(names[0], origin, names[min(group.mine)], owner)
            if any(stage in self.held and stage < self.stage for stage in group.tie.stages):
                # Another stage of this worker updates the memory that a module's places share.
                owner.data = torch.empty_like(owner.data)
            with torch.no_grad():
                owner.copy_(origin)
        for place, parameter in list(group.mine.items()):
            if parameter is not owner:
                _check(names[min(group.mine)], owner, names[place], parameter)
                if parameter.data_ptr() != owner.data_ptr():
                    parameter.data = owner.data

    @property
    def aliases(self) -> set[int]:
        """The ids of parameters that another one stands for."""
        return {id(p) for g in self._groups for p in g.mine.values() if p is not g.owner}

    @property
    def elsewhere(self) -> set[int]:
        """The ids of parameters whose gradient's norm another stage tells."""
        return {id(g.owner) for g in self._groups if 0 not in g.mine}

    @property
    def owners(self) -> list[tuple[str, nn.Parameter]]:
        """Each tied parameter here, and the name of its first place."""
        return [(g.tie.names[0], g.owner) for g in self._groups]

    @property
    def peers(self) -> set[int]:
        """The other stages that have places of its weights."""
        return {stage for tie in self.ties for stage in tie.stages if stage != self.stage}

    def outgoing(self, peer: int) -> list[list[torch.Tensor | None]]:
        """The gradients of this stage's places that another stage needs, in frames."""
        gradients = [
            group.mine[place].grad
            for group in self._groups
            if peer in group.tie.stages
            for place in sorted(group.mine)
        ]
        return [gradients[i : i + _FRAME] for i in range(0, len(gradients), _FRAME)]

    def frames(self, peer: int) -> int:
        """How many frames another stage sends."""
        return -(-sum(group.tie.stages.count(peer) for group in self._groups) // _FRAME)

    def complete(self, received: Mapping[int, Sequence[torch.Tensor | None]]) -> None:
        """Add up the gradients of all places, given what the other stages have, by stage."""
        streams = {peer: iter(gradients) for peer, gradients in received.items()}
        for group in self._groups:
            total: torch.Tensor | None = None
            for place, stage in enumerate(group.tie.stages):
                here = stage == self.stage
                gradient = group.mine[place].grad if here else next(streams[stage])
                if gradient is None:
                    continue
                if total is not None:
                    total = total + gradient
                else:
                    total = gradient if here else gradient.clone()  # its buffer is given back
            group.total = total

    def total(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of a parameter: the whole one, where it is tied."""
        for group in self._groups:
            if parameter is group.owner:
                return group.total
        return parameter.grad

    def take_totals(self) -> None:
        """Put the whole gradients where the optimizer looks."""
        for group in self._groups:
            for parameter in group.mine.values():
                parameter.grad = None
            group.owner.grad, group.total = group.total, None


def _parameter(layer: nn.Module, name: str) -> nn.Parameter:
    _, _, path = name.partition(".")
    found = dict(layer.named_parameters()).get(path)
    if found is None:
        raise UsageError(
            f"tied names {name!r}, but layer {layer_of(name)} ({type(layer).__name__}) has no "
            f"parameter {path!r}"
        )
    return found


def _check(one: str, left: torch.Tensor, other: str, right: torch.Tensor) -> None:
    if left.shape != right.shape or left.dtype != right.dtype:
        raise UsageError(
            f"tied parameters differ: {one} is {tuple(left.shape)} {left.dtype}, "
            f"{other} is {tuple(right.shape)} {right.dtype}"
        )
    if left.requires_grad is not right.requires_grad:
        raise UsageError(f"of the tied parameters {one} and {other} only one requires grad")
