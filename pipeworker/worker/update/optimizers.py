"""The optimizers of a stage and their schedulers, as the job's functions make them."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.job.file import JobFile
from pipeworker.job.signatures import accepts, call_scheduler, format_signature
from pipeworker.worker.blame import blame_user, user_code
from pipeworker.worker.update.empty_groups import accepting_empty_groups, has_parameters

Optimizer = torch.optim.Optimizer
_Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
_OTHER = (
    "its state may be that of another optimizer, which the checkpoint was written with; a new run "
    "with --init-from begins with the weights alone"
)


@dataclass(slots=True)
class StageOptimizers:
    """The optimizers of a stage, none if it has nothing to train, and their schedulers.

    Attributes:
        returned: what the job's ``optimizer`` returned: one optimizer, or a list of them.
        all: those of them that have parameters of the stage.
        leading: the first parameter that the stage trains, the optimizer that has it, and the
            number of its group. The model's first one does not depend on the number of stages.
        schedulers: for each optimizer its scheduler, or None; empty without schedulers.
    """

    returned: Optimizer | Sequence[Optimizer] | None = None
    all: Sequence[Optimizer] = ()
    leading: tuple[nn.Parameter, Optimizer, int] | None = None
    schedulers: Sequence[Any] = ()
    _make_schedulers: Callable[[], Any] | None = None
    _used: Sequence[bool] = ()
    """For each optimizer that was returned, whether it has parameters of the stage."""
    _others: Sequence[torch.Tensor] = ()
    """The tensors that the optimizers have besides the stage's parameters."""
    _groups: Sequence[int] = ()
    """The number of parameter groups of each of `all`."""
    _rates: Sequence[Sequence[tuple[Any, Any]]] = ()
    """The learning rates of each group of `all`, before and after the schedulers were made."""

    @classmethod
    def make(
        cls, job: JobFile, arguments: Any, own: Sequence[nn.Parameter], steps: int
    ) -> StageOptimizers:
        """Call the job's ``optimizer`` and ``scheduler``, and check what they return.

        Args:
            job: the job with these functions.
            arguments: what ``optimizer`` is called with.
            own: the parameters that are updated, in model order.
            steps: the number of steps of the job, 0 if unknown.

        Raises:
            UsageError: a function returned something else.
            UserCodeError: a function raised.
        """
        try:
            with accepting_empty_groups():
                returned = job.optimizer(arguments)
        except BaseException as error:
            is_lookup = isinstance(error, (LookupError, StopIteration))
            note = "each stage calls it with its own parameters alone" if is_lookup else ""
            blame_user("optimizer()", error, early=True, note=note)
        every = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        for one in every:
            _check_optimizer(one, a_list=one is not returned)
        leading = _leading(returned, every, own)
        used = [has_parameters(one) for one in every]
        others = _others(every, own)
        made = cls(returned, list(compress(every, used)), leading, _used=used, _others=others)
        if job.scheduler is not None:
            made._make_schedulers = partial(call_scheduler, job.scheduler, returned, steps)
            rates = made._group_rates("lr")
            with user_code("scheduler()", early=True):
                schedulers = made._make_schedulers()
            made._rates = [
                [*zip(*both, strict=True)]
                for both in zip(rates, made._group_rates("initial_lr"), strict=True)
            ]
            schedulers = _checked_schedulers(schedulers, returned, every)
            made.schedulers = list(compress(schedulers, used))
        made._groups = made._count_groups()
        return made

    @property
    def wants_metric(self) -> bool:
        """Whether a scheduler uses a figure of evaluations."""
        return any(isinstance(one, _Plateau) for one in self.schedulers)

    @property
    def wants_more(self) -> bool:
        """Whether a scheduler uses a figure of evaluations of which more is better."""
        return any(isinstance(one, _Plateau) and one.mode == "max" for one in self.schedulers)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the leading optimizer's group; NaN without one.

        Raises:
            UsageError: it is not a number.
        """
        _, optimizer, number = self.leading or (None, None, 0)
        group = optimizer.param_groups[number] if optimizer else {}
        if "lr" not in group:
            return math.nan
        try:
            rate = float(group["lr"])
        except (TypeError, ValueError):
            rate = math.nan
        if math.isnan(rate):
            raise UsageError(f"the learning rate of the optimizer is {group['lr']!r}, not a number")
        return rate

    def step(self) -> None:
        """Step the optimizers, in their order.

        Raises:
            UsageError: one trains a parameter that no layer has. Its gradient would be neither
                scaled nor cleared, and no checkpoint would have it. Or one has other parameter
                groups than at the start, with which no checkpoint could be loaded.
            UserCodeError: one raised.
        """
        if (groups := self._count_groups()) != self._groups:
            raise UsageError(
                f"the optimizer has {sum(groups)} parameter groups, and had {sum(self._groups)} at "
                "the start; a run that resumes has those of optimizer(params) alone, so make all "
                "groups there, with a learning rate of 0 until they are to be trained"
            )
        for other in self._others:
            if other.grad is not None:
                raise UsageError(
                    f"optimizer(params) trains a tensor of shape {list(other.shape)} that is none "
                    "of `params`, as one of the loss; make it a parameter of the last layer, which "
                    "returns what the loss needs of it"
                )
        with user_code("the optimizer"):
            for optimizer in self.all:
                try:
                    optimizer.step()
                except KeyError as error:
                    blame_user("the optimizer", error, note=_OTHER)

    def _count_groups(self) -> list[int]:
        return [len(optimizer.param_groups) for optimizer in self.all]

    def step_schedulers(self) -> None:
        """Step the schedulers, except those that use the evaluation loss."""
        with user_code("the scheduler"):
            for scheduler in self.schedulers:
                if scheduler is not None and not isinstance(scheduler, _Plateau):
                    scheduler.step()

    def report_evaluation(self, loss: float, best: float | None = None) -> None:
        """Step the schedulers that use the evaluation loss, or the figure of which more is better.

        A figure that is not finite, which is None here, is no improvement.
        """
        more = math.nan if best is None else best
        with user_code("the scheduler"):
            for scheduler in self.schedulers:
                if isinstance(scheduler, _Plateau):
                    scheduler.step(more if scheduler.mode == "max" else loss)

    def restart_schedulers(self, count: int) -> None:
        """Make the schedulers again, as they are after `count` calls of step.

        The learning rates begin with those that the parameter groups began with. A scheduler that
        uses the evaluation loss is left alone.

        Raises:
            UserCodeError: a scheduler raised.
        """
        assert self._make_schedulers
        stays = [isinstance(one, _Plateau) for one in self.schedulers]
        for optimizer, rates, kept in zip(self.all, self._rates, stays, strict=True):
            for group, (rate, initial) in zip(optimizer.param_groups, rates, strict=True):
                if kept or "initial_lr" not in group:  # of an optimizer without a scheduler
                    continue
                # What the scheduler has made of the rate, as OneCycleLR does, it makes again.
                begin = rate if group["initial_lr"] == initial else group["initial_lr"]
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(begin)
                else:
                    group["lr"] = begin
        with user_code("the scheduler"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer makes no step in between
            made = self._make_schedulers()
            every = compress(made if isinstance(made, (list, tuple)) else [made], self._used)
            self.schedulers = [
                old if kept else new
                for old, new, kept in zip(self.schedulers, every, stays, strict=True)
            ]
            for _ in range(count):
                self.step_schedulers()

    def _group_rates(self, key: str) -> list[list[Any]]:
        """Return copies of a rate of each group of all optimizers; None where a group has none."""
        return [
            [copy.deepcopy(group.get(key)) for group in optimizer.param_groups]
            for optimizer in self.all
        ]


def _check_optimizer(built: Any, *, a_list: bool) -> None:
    what = f"optimizer(params) returned {'a list with ' if a_list else ''}{a_type(built)}"
    if not isinstance(built, Optimizer):
        raise UsageError(f"{what}; return a torch.optim.Optimizer, or a list of them")
    closure = inspect.signature(built.step).parameters.get("closure")
    if isinstance(built, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise UsageError(
            f"{what}, which evaluates the model inside its step; a pipeline cannot do that, choose "
            "another optimizer"
        )
    if type(built).state_dict is not Optimizer.state_dict:
        raise UsageError(
            f"{what}, whose state_dict() is its own; a run resumes with what is in `state` and "
            "`param_groups`, so choose an optimizer that keeps its state there"
        )


def _leading(
    returned: Any, every: Sequence[Optimizer], own: Sequence[nn.Parameter]
) -> tuple[nn.Parameter, Optimizer, int]:
    """Return the first parameter of a stage that any optimizer has, that optimizer, and the group.

    Frozen parameters come last, because another number of stages may leave out their stage.
    """
    place_of: dict[int, tuple[Optimizer, int]] = {}
    for optimizer in every:
        groups = enumerate(optimizer.param_groups)
        found = {id(p): (optimizer, number) for number, group in groups for p in group["params"]}
        if found.keys() & place_of.keys():
            raise UsageError(
                "optimizer(params) returned two optimizers with the same parameter; give each "
                "parameter to one of them"
            )
        place_of |= found
    trained_first = sorted(own, key=lambda p: not p.requires_grad)
    leading = next(((p, *place_of[id(p)]) for p in trained_first if id(p) in place_of), None)
    if leading is None:
        raise UsageError(
            f"optimizer(params) returned {a_type(returned)} with none of `params`, so this stage "
            "would not be trained; pass `params` to it, and freeze parameters with "
            "requires_grad_(False)"
        )
    return leading


def _others(every: Sequence[Optimizer], own: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return what optimizers have besides a stage's parameters, as those of the other stages."""
    known = set(map(id, own))
    groups = [group for optimizer in every for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"] if id(p) not in known]


def _checked_schedulers(
    returned: Any, optimizers: Any, every: Sequence[Optimizer]
) -> Sequence[Any]:
    """Return the scheduler of each optimizer; `optimizers` is one, or a list of `every` one.

    For several optimizers they are a list, so that none is left to one that another stage lacks.
    """
    if optimizers is every[0]:
        schedulers = [returned]
    elif isinstance(returned, (list, tuple)) and len(returned) == len(every):
        schedulers = list(returned)
    else:
        is_list = isinstance(returned, (list, tuple))
        found = f"a list of {len(returned)}" if is_list else a_type(returned)
        raise UsageError(
            f"scheduler(optimizer) returned {found} for a list of {len(every)} optimizers; return "
            "a list with a scheduler, or None, for each of them"
        )
    for scheduler, optimizer in zip(schedulers, every, strict=True):
        if scheduler is not None or optimizer is optimizers:
            _check_scheduler(scheduler, optimizer)
    return schedulers


def _check_scheduler(scheduler: Any, built: Optimizer) -> None:
    kind = a_type(scheduler)
    if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
        raise UsageError(f"scheduler(optimizer) returned {kind}; return a learning-rate scheduler")
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise UsageError(
            f"scheduler(optimizer) returned {kind} without state_dict() and load_state_dict(), "
            "which a run that resumes needs; add them, or derive it from torch's LRScheduler"
        )
    of = getattr(scheduler, "optimizer", built)
    if isinstance(of, Optimizer) and of is not built:
        raise UsageError(
            f"scheduler(optimizer) returned {kind} of another optimizer, so this stage's "
            "learning rate would not change; pass `optimizer` to it"
        )
    if not isinstance(scheduler, _Plateau) and not accepts(scheduler.step, 0):
        raise UsageError(
            f"scheduler(optimizer) returned {kind} with {format_signature(scheduler.step)}; return "
            "an object of your own whose step() counts its calls and steps it"
        )
