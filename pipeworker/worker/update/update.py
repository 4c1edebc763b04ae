"""The optimizer step of a stage: it reports gradient norms and applies scaled updates."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.layer_names import layer_of, numbered, shown, split_numbered
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.job.signatures import signature, takes_steps
from pipeworker.record.checkpoint.stage_state import OptimizerState
from pipeworker.wire.messages.step import Update
from pipeworker.worker.blame import user_code
from pipeworker.worker.internals import divide, multiply
from pipeworker.worker.stage import rng
from pipeworker.worker.update.optimizers import StageOptimizers
from pipeworker.worker.update.replicas import shards
from pipeworker.worker.update.ties import Ties

_NO_LAYER = -1


class Updater:
    """The optimizers and learning-rate schedulers that update the weights of a stage.

    The job's ``optimizer`` is not called on a stage with nothing to train. If it has an argument
    called ``named_parameters``, it gets pairs of a name and a parameter; names are those of
    ``nn.Sequential(*layers).named_parameters()``, and of a cut module its own.

    If several replicas each update a part of the weights, the optimizer gets the part of `replica`
    only; the other parts come from the other replicas. `first` is the index of the first layer in
    the whole model, and `clip_value` bounds each element of the gradients. `steps` is the number of
    steps of the job, 0 if unknown. `tracker` gets the layer whose ``before_update`` runs.

    Raises:
        UsageError: ``optimizer`` or ``scheduler`` returned something else.

    Attributes:
        parameters: the stage's parameters that are not aliases of others.
        optimizers: the stage's optimizers and their schedulers.
        steps: the number of steps that the scheduler was made for; 0 if it takes none.
        leading_place: the layer of the parameter whose group has the learning rate, and the
            parameter's number in the layer.
        shards: by replica, the parameters that it updates.
        draws: whether the optimizer draws random numbers in its step; None before the first one.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        job: JobFile,
        *,
        seed: int = 0,
        clip_value: float | None = None,
        ties: Ties | None = None,
        replica: int = 0,
        replicas: int = 1,
        steps: int = 0,
        tracker: Tracker | None = None,
    ) -> None:
        self._all = list(nn.ModuleList(layers).parameters())  # each once
        self._ties, aliases = ties, ties.aliases if ties else ()
        self.parameters = [p for p in self._all if id(p) not in aliases]
        self.optimizers, self.leading_place = StageOptimizers(), (0, 0)
        self.steps = steps if takes_steps(job.scheduler) else 0
        self._by_epoch = job.scheduler_interval == "epoch"
        self._before_update = job.before_update
        self._layers = list(enumerate(layers, first))
        self._layer_of = {
            id(p): n for n, layer in reversed(self._layers) for p in layer.parameters()
        }
        self._seed, self._clip_value = seed, clip_value
        self._tracker = tracker or Tracker()
        self._is_frozen = not any(p.requires_grad for p in self._all)
        self._accelerator = next((rng.accelerator_generator(p.device) for p in self._all), None)
        self._stream = rng.Stream(self._accelerator)
        self.draws: bool | None = None
        self.shards, own = [self.parameters], self.parameters
        self._apart: list[nn.Parameter] = []
        """Frozen parameters, which the replicas would update apart from each other."""
        if replicas > 1:
            self._apart = [p for p in self.parameters if not p.requires_grad]
            self.shards = shards([p for p in self.parameters if p.requires_grad], replicas)
            updated = {id(p) for p in self.shards[replica]}
            # The first replica's optimizer has those that no step changes.
            own = [p for p in own if id(p) in updated or not (replica or p.requires_grad)]
        if not any(parameter.requires_grad for parameter in own):
            return
        arguments: Any = own
        expected = signature(job.optimizer)
        if expected is not None and "named_parameters" in expected.parameters:
            named = nn.Sequential(*layers).named_parameters()
            ids = {id(p) for p in own}
            tied = {id(p): name for name, p in ties.owners} if ties else {}
            arguments = [
                (shown(tied.get(id(p)) or _shifted(name, first)), p)
                for name, p in named
                if id(p) in ids
            ]
        self.optimizers = StageOptimizers.make(job, arguments, own, steps)
        leading = self.optimizers.leading and self.optimizers.leading[0]
        places = ((n, k, p) for n, one in self._layers for k, p in enumerate(one.parameters()))
        self.leading_place = next((n, k) for n, k, p in places if p is leading)

    @property
    def _range(self) -> str:
        return f"layers {self._layers[0][0]} to {self._layers[-1][0]}"

    def squares(self) -> list[float]:
        """Return floats whose exact sum is the squared 2-norm of the stage's gradient.

        They are computed in float64, one per parameter, or per part of a large one.
        """
        if self._ties is None:
            found = [p.grad for p in self.parameters]
        else:
            counted = self._ties.elsewhere
            found = [self._ties.total(p) for p in self.parameters if id(p) not in counted]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            return []
        parts = [part for gradient in gradients for part in _parts(gradient)]
        norms = torch.empty(len(parts), dtype=torch.float64, device=parts[0].device)
        # Results with memory of their own would lie between the copies as float64, and glibc would
        # use none of those again.
        for part, norm in zip(parts, norms.unbind(), strict=True):
            torch.linalg.vector_norm(part, dtype=torch.float64, out=norm)
        return list(norms.square_().tolist())

    def apply(self, update: Update) -> None:
        """Scale and clip the gradients, step the optimizer and the scheduler, drop the gradients.

        Raises:
            UsageError: a parameter wants a gradient now, of a stage where none did at the start, or
                with a sharded optimizer.
            UserCodeError: the optimizer, the scheduler or ``before_update`` raised.
        """
        if self._is_frozen and any(p.requires_grad for p in self._all):
            raise UsageError(
                f"a parameter of {self._range} requires grad now, while none did at the "
                "start, so their stage has no optimizer; call requires_grad_() in model() instead, "
                "and continue with --resume"
            )
        if any(p.requires_grad for p in self._apart):
            raise UsageError(
                f"a parameter of {self._range} requires grad now, and did not at the "
                "start, so no replica updates it for all; call requires_grad_() before the start, "
                "or leave out --shard-optimizer"
            )
        if self._ties is not None:
            self._ties.set_gradients()
        if not update.overflow:
            self._finish_gradients(update)
            if self.optimizers.all:
                # For an optimizer that draws random numbers: an evaluation before must not matter.
                self._seed_all(update.step, _NO_LAYER)
                before = self._stream.states() if self.draws is None else None
                self.optimizers.step()
                if before is not None:
                    self.draws = rng.have_drawn(before, self._stream.states())
            if self._ties is not None:
                self._ties.share()
        if update.epoch_ended or not self._by_epoch:
            self.optimizers.step_schedulers()
        self.clear()

    @property
    def states(self) -> list[OptimizerState]:
        """The state of each optimizer and of its scheduler."""
        found = []
        every = self.optimizers.all
        schedulers = self.optimizers.schedulers or [None] * len(every)
        for optimizer, scheduler in zip(every, schedulers, strict=True):
            schedule = None
            if scheduler is not None:
                with user_code("state_dict() of the scheduler"):
                    schedule = scheduler.state_dict()
            found.append(OptimizerState(optimizer, schedule, scheduler))
        return found

    def end_epoch(self, step: int) -> None:
        """Step schedulers that epochs step, after `step` of a user's own loop."""
        if self._by_epoch and self.optimizers.schedulers:
            self._seed_all(step, _NO_LAYER)  # as in the update with which an epoch of data ends
            self.optimizers.step_schedulers()

    def _finish_gradients(self, update: Update) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_conj():
                parameter.grad = parameter.grad.resolve_conj()  # to be changed in place
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for alike in _by_kind(gradients):
            # Divide, as a plain loop does: a product with the reciprocal differs in the last bit.
            if update.divisor != 1.0:
                divide(alike, update.divisor)
            if update.scale != 1.0:
                multiply(alike, _factor(update.scale, alike[0]))
        if gradients and self._clip_value is not None:  # torch rejects an empty list
            if found := [g for g in gradients if g.is_sparse or g.is_complex()]:
                kind = "sparse" if found[0].is_sparse else "complex"
                raise UsageError(
                    f"--clip-grad-value: a parameter of {self._range} has a {kind} "
                    "gradient, which torch cannot clip by value; use --clip-grad-norm"
                )
            torch.nn.utils.clip_grad_value_(self.parameters, self._clip_value)
        if self._before_update is None:
            return
        # By layer, and each tied weight by itself: random numbers must not depend on the stages.
        owners = self._ties.owners if self._ties is not None else []
        for name, parameter in owners:
            if parameter.grad is not None:
                number = 1 + zlib.crc32(name.encode())
                self._seed_all(update.step, layer_of(name), number)
                self._hook([parameter], update.step)
        seen = {id(parameter) for _, parameter in owners}
        for index, layer in self._layers:
            own = [p for p in layer.parameters() if p.grad is not None and id(p) not in seen]
            seen.update(map(id, own))
            if own:
                self._seed_all(update.step, index)
                self._hook(own, update.step)
        self._tracker.set(Phase.UPDATE, update.step)

    def _seed_all(self, step: int, layer: int, tie: int = 0) -> None:
        rng.seed_all(rng.update_seed(self._seed, step, layer, tie), self._accelerator)

    def _hook(self, parameters: list[nn.Parameter], step: int) -> None:
        """Call ``before_update`` with parameters of one layer."""
        assert self._before_update
        self._tracker.set(Phase.UPDATE, step, layer=self._layer_of[id(parameters[0])])
        with user_code("before_update()"):
            self._before_update(parameters)

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self._all:
            parameter.grad = None


def _shifted(name: str, first: int) -> str:
    index, key = split_numbered(name)
    return numbered(index + first, key)


def _by_kind(gradients: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return gradients in lists that torch changes by one kernel.

    For a list of several dtypes or layouts torch has other kernels on a GPU, which multiply by the
    reciprocal. What a stage's gradients have in common depends on the number of stages.
    """
    found: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        kind = gradient.dtype, gradient.device, gradient.layout
        found.setdefault(kind, []).append(gradient)
    return found.values()


def _factor(scale: float, gradient: torch.Tensor) -> torch.Tensor | float:
    """Return a factor that is not rounded to a short dtype, as a float is by torch on a CPU."""
    if not gradient.is_cpu:  # here torch's kernels would refuse a tensor of the CPU
        return scale
    dtype = torch.promote_types(gradient.dtype.to_real(), torch.float32)
    return torch.tensor(scale, dtype=dtype, device="cpu")


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient, which may be sparse or complex, as real numbers."""
    values = gradient.detach()
    if values.is_mps:  # MPS has no float64
        values = values.cpu()
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


_PART = 1 << 15
"""Elements whose norm one thread computes in its cache: torch copies them as float64 on a CPU."""


def _parts(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the elements of a gradient in tensors of which a norm is computed fast."""
    values = _elements(gradient)
    return torch.split(values.flatten(), _PART) if values.is_cpu else [values]
