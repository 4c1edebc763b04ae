"""Tied weights: one parameter at several places of the model, on one stage or on several.

Each place has a parameter object and a gradient of its own, even where places share a stage. The
order of additions therefore does not depend on the grouping: micro-batches at each place first,
then the places in model order. On one stage the objects share their memory. Where places are on
several stages, the stages exchange the gradients at the end of a step, and each applies the same
update to its own copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Tie
from pipeworker.facts.layer_names import layer_of, numbered, split_numbered
from pipeworker.job.layers import Entry
from pipeworker.worker.internals import move_hooks, version_of
from pipeworker.worker.stage.cut.units import computed_attributes
from pipeworker.worker.stage.values import is_dense
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.layout import span_of

_FRAME = 64
"""Number of gradients in a frame."""


def shared_parameters(entries: Sequence[Entry]) -> list[list[str]]:
    """Return the names of each parameter that is one object in several layers."""
    places: dict[int, list[str]] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, nn.Module):
            for name, parameter in entry.named_parameters():
                places.setdefault(id(parameter), []).append(numbered(index, name))
    return [names for names in places.values() if len(names) > 1]


class _Range(NamedTuple):
    """The addresses of the begin and the end of a tensor's elements, with its place."""

    begin: int
    end: int
    layer: int
    name: str
    tensor: torch.Tensor


def reject_common_memory(entries: Sequence[Entry]) -> None:
    """Reject a trained parameter in whose memory another layer has a tensor of its own.

    Each stage would have its own memory. One parameter that is in several layers is tied.

    Raises:
        UsageError: two layers have such tensors.
    """
    last: _Range | None = None
    for one in sorted(_ranges(entries), key=itemgetter(0)):
        if last is None or last.end <= one.begin:
            last = one
            continue
        trained = last.tensor.requires_grad or one.tensor.requires_grad
        if trained and last.layer != one.layer and last.tensor is not one.tensor:
            first, second = sorted((last, one), key=itemgetter(2))
            raise UsageError(
                f"layers {first.layer} and {second.layer}: {first.name} and {second.name} are two "
                "tensors in the same memory, and each stage would have its own; make them one "
                "parameter of both layers (b.weight = a.weight), which is then tied, or clone() one"
            )
        last = max(last, one, key=itemgetter(1))


def _ranges(entries: Sequence[Entry]) -> Iterator[_Range]:
    """Yield where the dense parameters and buffers of layers are."""
    for index, entry in enumerate(entries):
        named = entry if isinstance(entry, nn.Module) else nn.Module()
        for name, tensor in (*named.named_parameters(), *named.named_buffers()):
            plain = type(tensor.data) is torch.Tensor and is_dense(tensor)
            if plain and tensor.numel() and not tensor.is_meta:
                begin = tensor.data_ptr()
                end = begin + span_of(tensor.shape, tensor.stride()) * tensor.itemsize
                yield _Range(begin, end, index, numbered(index, name), tensor)


def separate(entry: nn.Module, names: Iterable[str]) -> nn.Module:
    """Copy a layer so that its parameters of these names are objects of their own.

    They share memory with the original's. All other parameters and buffers are the original's.
    """
    parameters = dict(entry.named_parameters())
    memo = computed_attributes(entry)
    memo |= {id(t): t for t in (*entry.parameters(), *entry.buffers())}
    for name in names:
        memo[id(parameters[name])] = _alias(parameters[name])
    return copy.deepcopy(entry, memo)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)  # an optimizer may read attributes that the user set
    alias.grad_dtype = parameter.grad_dtype
    move_hooks(parameter, alias)
    return alias


@dataclass(slots=True)
class _Group:
    """A tie on one stage: the stage's own parameters by place, and the sum of all gradients.

    `wanted_grad` and `versions` are those of the parameters as the mini-batch began.
    """

    tie: Tie
    own: dict[int, nn.Parameter]
    total: torch.Tensor | None = None
    wanted_grad: bool = False
    versions: list[int] = field(default_factory=list)

    @property
    def owner(self) -> nn.Parameter:
        """The parameter that the stage's optimizer updates."""
        return self.own[min(self.own)]


@dataclass(slots=True)
class Ties:
    """The ties that have a place on a stage.

    Attributes:
        layers: the stage's layers, by index in the model.
        build: builds any layer of the model, to get the values of a first place on another stage.
        local_stages: the stages of this worker.

    Raises:
        UsageError: a name is not a parameter's, or shapes differ.
    """

    stage: int
    ties: Sequence[Tie]
    layers: Mapping[int, nn.Module]
    build: Callable[[int], nn.Module]
    local_stages: Collection[int] = ()
    _groups: list[_Group] = field(default_factory=list)
    _received: dict[int, tuple[Receiver, list[torch.Tensor | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tie in self.ties:
            own = {
                place: _parameter(self.layers[layer_of(name)], name)
                for place, (name, stage) in enumerate(zip(tie.names, tie.stages, strict=True))
                if stage == self.stage
            }
            group = _Group(tie, own)
            self._initialize(group)
            self._groups.append(group)

    def _initialize(self, group: _Group) -> None:
        """Set every place to the value of the first one."""
        names, owner = group.tie.names, group.owner
        if 0 not in group.own:
            origin = _parameter(self.build(layer_of(names[0])), names[0])
            _check(names[0], origin, names[min(group.own)], owner)
            if any(stage in self.local_stages and stage < self.stage for stage in group.tie.stages):
                # Another stage of this worker updates the memory that a module's places share.
                owner.data = torch.empty_like(owner.data)
            with torch.no_grad():
                owner.copy_(origin)
        for place, parameter in group.own.items():
            _check(names[min(group.own)], owner, names[place], parameter)
            parameter.data = owner.data

    @property
    def aliases(self) -> set[int]:
        """The ids of parameters that share the memory of the one the optimizer updates."""
        return {id(p) for g in self._groups for p in g.own.values() if p is not g.owner}

    @property
    def elsewhere(self) -> set[int]:
        """The ids of parameters whose gradient another stage counts in the norm."""
        return {id(g.owner) for g in self._groups if 0 not in g.own}

    @property
    def owners(self) -> list[tuple[str, nn.Parameter]]:
        """The name of each tie's first place, and the parameter that is updated here."""
        return [(g.tie.names[0], g.owner) for g in self._groups]

    @property
    def peers(self) -> set[int]:
        """The other stages that have places of the stage's tied weights."""
        return {stage for tie in self.ties for stage in tie.stages if stage != self.stage}

    def begin(self) -> None:
        """Begin a mini-batch, which may change no tied weight."""
        for group in self._groups:
            group.wanted_grad = group.owner.requires_grad
            group.versions = [*map(version_of, group.own.values())]

    def check(self) -> None:
        """Reject a change of a tied weight by a forward or a backward, at a place alone.

        Raises:
            UsageError: other places were not changed.
        """
        for group in self._groups:
            name, own = group.tie.names[0], group.own.values()
            is_apart = len({*group.tie.stages}) > 1
            wanted = {parameter.requires_grad for parameter in own}
            if len(wanted) > 1 or (is_apart and wanted != {group.wanted_grad}):
                raise UsageError(
                    f"tied: requires_grad of {name} was changed within a step at one of its "
                    f"places, {', '.join(group.tie.names)}, each of which is a parameter of its "
                    "own; change it in model(), or of the parameter that before_update() gets"
                )
            if is_apart and group.versions != [*map(version_of, own)]:
                raise UsageError(
                    f"tied: {name} was changed in place within a step, as by "
                    "nn.Embedding(max_norm=...), and other stages have copies of it; change it in "
                    "the optimizer's step(), or have its layers on one stage (--balance)"
                )

    def outgoing(self, peer: int) -> list[torch.Tensor | None]:
        """Return the gradients of this stage's places that another stage needs."""
        return [gradient for _, gradient in self._outgoing(peer)]

    def _outgoing(self, peer: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the gradients that another stage needs, each with the name of its place."""
        for group in self._groups:
            if peer in group.tie.stages:
                for place in sorted(group.own):
                    yield group.tie.names[place], group.own[place].grad

    def frames(self, peer: int) -> range:
        """Return the numbers of another stage's frames: that of each's first gradient."""
        return range(0, sum(group.tie.stages.count(peer) for group in self._groups), _FRAME)

    def send(self, peer: int, sender: Sender) -> None:
        """Send the gradients of this stage's places to another stage, some in each frame.

        Raises:
            UsageError: one of them is sparse.
        """
        for name, gradient in self._outgoing(peer):
            if gradient is not None and not is_dense(gradient):
                raise UsageError(
                    f"tied: the gradient of {name} is sparse, and stages exchange dense ones; make "
                    "it dense, as by nn.Embedding(sparse=False), or have its layers on one stage "
                    "(--balance)"
                )
        gradients = self.outgoing(peer)
        for first in range(0, len(gradients), _FRAME):
            sender.send(first, gradients[first : first + _FRAME])

    def receive(self, peer: int, receiver: Receiver) -> None:
        """Receive the gradients of the places on another stage; :meth:`reduce` releases them."""
        gradients = [g for number in self.frames(peer) for g in receiver.receive(number)]
        self._received[peer] = receiver, gradients

    def reduce(self, local: Mapping[int, Ties]) -> None:
        """Add up the gradients of all places, once those of other workers are here.

        `local` has the ties of this worker's stages.
        """
        self.check()
        received = {peer: gradients for peer, (_, gradients) in self._received.items()}
        for peer in self.peers - received.keys():
            received[peer] = local[peer].outgoing(self.stage)
        self.add_up(received)
        for peer, (receiver, _) in self._received.items():
            for number in self.frames(peer):
                receiver.release(number)
        self._received.clear()

    def add_up(self, received: Mapping[int, Sequence[torch.Tensor | None]]) -> None:
        """Add up the gradients of all places; `received` has those of other stages, by stage."""
        streams = {peer: iter(gradients) for peer, gradients in received.items()}
        for group in self._groups:
            total: torch.Tensor | None = None
            for place, stage in enumerate(group.tie.stages):
                here = stage == self.stage
                gradient = group.own[place].grad if here else next(streams[stage])
                if total is not None and gradient is not None:
                    is_mixed = total.is_sparse and not gradient.is_sparse
                    total = gradient + total if is_mixed else total + gradient  # as autograd does
                elif gradient is not None:
                    total = gradient if here else gradient.clone()  # the channel reuses its buffer
            group.total = total

    def total(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter; for a tied one, the sum over all places."""
        for group in self._groups:
            if parameter is group.owner:
                return group.total
        return parameter.grad

    def share(self) -> None:
        """Have places on one stage be one parameter again: an update may change the first alone.

        ``owner.data = ...`` ends that they share their memory, or reads it in another way, as
        ``owner.data = owner.data.t()`` does.
        """
        for group in self._groups:
            owner = group.owner
            for parameter in group.own.values():
                if parameter is not owner:
                    parameter.data = owner.data
                if owner.requires_grad is not group.wanted_grad:
                    parameter.requires_grad_(owner.requires_grad)

    def set_gradients(self) -> None:
        """Set ``grad`` of each updated parameter to the sum over all places."""
        for group in self._groups:
            for parameter in group.own.values():
                parameter.grad = None
            group.owner.grad, group.total = group.total, None


def _parameter(layer: nn.Module, name: str) -> nn.Parameter:
    index, key = split_numbered(name)
    found = dict(layer.named_parameters()).get(key)
    if found is None:
        raise UsageError(
            f"tied: names {name!r}, but layer {index} ({type(layer).__name__}) has no parameter "
            f"{key!r}; name one that it has"
        )
    return found


def _check(one: str, left: torch.Tensor, other: str, right: torch.Tensor) -> None:
    if left.shape != right.shape or left.dtype != right.dtype:
        raise UsageError(
            f"tied: {one} is {tuple(left.shape)} {left.dtype}, but {other} is "
            f"{tuple(right.shape)} {right.dtype}; tie equal ones"
        )
    if left.requires_grad is not right.requires_grad:
        raise UsageError(
            f"tied: of {one} and {other} only one requires grad; let both, or freeze both"
        )
