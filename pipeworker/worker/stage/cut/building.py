"""Building a module of which a process holds a part: other parameters take no memory.

Parameters are counted as modules register them. The first build shows which number each name has;
the second one makes those real that the process owns. All other parameters are fake tensors, and
what would fill them with random numbers draws them all the same, one parameter at a time: so every
process has the numbers of a module that is built as a whole, under the same seed.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import (
    TorchDispatchMode,
    changed_by,
    is_fake,
    is_random,
    pytree,
    truncated_normal_by,
    without_fake_modes,
)
from pipeworker.worker.stage.cut.units import hollow_parameter
from pipeworker.worker.transport.layout import span_of


class NeedsWhole(Exception):
    """A module whose parameters are made of each other, so that no part can be built alone."""


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers of parameters that take no memory, if it `draws`."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._space = mmap.mmap(-1, mmap.PAGESIZE)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(map(is_fake, tensors)):
            return func(*args, **kwargs)
        changed = [*changed_by(func, args, kwargs)]
        if not all(map(is_fake, changed)):
            raise NeedsWhole(f"{func} fills a parameter with the numbers of another")
        if is_random(func) and self._draws:
            reads = any(is_fake(t) and not any(t is one for one in changed) for t in tensors)
            if reads and not func.__name__.partition(".")[0].endswith("_like"):
                raise NeedsWhole(f"{func} draws by the numbers of a parameter")
            with without_fake_modes():
                func(*pytree.tree_map_only(torch.Tensor, self._real, args), **kwargs)
        return func(*args, **kwargs)

    def fill(
        self, function: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Fill a parameter by a function that needs its numbers."""
        if not is_fake(tensor):
            return function(tensor, *args, **kwargs)
        if self._draws:
            with without_fake_modes():
                function(self._real(tensor), *args, **kwargs)
        return tensor

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor for a fake one, in memory that is used again for each.

        Memory from ``malloc`` would remain in the process's heap.
        """
        shape, strides = tuple(tensor.shape), tensor.stride()
        if not is_fake(tensor) or not tensor.numel():
            return tensor if not is_fake(tensor) else torch.empty(shape, device="cpu")
        # A kernel may draw another count of numbers for a tensor that is not contiguous.
        count = span_of(shape, strides)
        if count * tensor.itemsize > len(self._space):
            self._space = mmap.mmap(-1, count * tensor.itemsize)
        flat = torch.frombuffer(self._space, dtype=tensor.dtype, count=count)
        return flat.as_strided(shape, strides)


class _TooLarge(BaseException):
    """Ends the build of a model that is larger than a limit."""


@contextmanager
def _registering(note: Callable[[str, nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Have modules keep what `note` returns for each parameter that they register, by its name."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and (kept := note(name, parameter)) is not parameter:
            original(module, name, kept)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def partly(owns: Callable[[int], bool], *, draws: bool) -> Iterator[list[nn.Parameter]]:
    """Have modules that are built inside the context hold only some parameters.

    Yields the parameters in the order of their registration. With `draws` the random numbers of
    all others are drawn.

    Raises:
        NeedsWhole: a parameter that is owned depends on others.
    """
    registered: list[nn.Parameter] = []
    noted: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    """By the id of a parameter: itself, while it lives, and the one that is kept for it."""

    def note(name: str, parameter: nn.Parameter) -> nn.Parameter:
        same, kept = noted.get(id(parameter), (None, parameter))
        if same is not None and same() is parameter:  # several modules have it
            return kept
        kept = parameter
        if not owns(len(registered)):
            kept = hollow_parameter(parameter)
            kept.__dict__.update(parameter.__dict__)
        elif is_fake(parameter):
            raise NeedsWhole(f"{name} is made of other parameters")
        for one in (parameter, kept):
            noted[id(one)] = weakref.ref(one), kept
        registered.append(kept)
        return kept

    with _registering(note), _Draws(draws=draws) as drawing, truncated_normal_by(drawing.fill):
        yield registered


def build_part(
    make: Callable[[], Any], order: Collection[str], owned: Collection[str]
) -> nn.Module:
    """Return a module of which only the parameters `owned` have memory.

    Args:
        make: builds the module.
        order: the names of its parameters in the order of registration, from :func:`build_hollow`.
        owned: names of parameters.

    Raises:
        NeedsWhole: they depend on others, or the module is built in another order.
    """
    names = list(order)
    wanted = {number for number, name in enumerate(names) if name in {*owned}}
    with partly(wanted.__contains__, draws=True) as found:
        module = make()
    if not isinstance(module, nn.Module) or order_of(module, found) != names:
        raise NeedsWhole("model() registers its parameters in another order each time")
    return module


def build_hollow(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `make` returns, its parameters without memory, and their names in order."""
    with partly(lambda _: False, draws=False) as found:
        made = make()
    return made, order_of(made, found) if isinstance(made, nn.Module) else []


def build_small(make: Callable[[], Any], limit: int) -> tuple[bool, Any]:
    """Return True and what `make` returns, unless its parameters take more than `limit` bytes."""
    total = 0

    def note(_: str, parameter: nn.Parameter) -> nn.Parameter:
        nonlocal total
        total += parameter.nbytes
        if total > limit:
            raise _TooLarge
        return parameter

    with suppress(_TooLarge), _registering(note):
        return True, make()
    return False, None


def order_of(module: nn.Module, registered: list[nn.Parameter]) -> list[str]:
    """Return a name for each registered parameter; "" for one that the module does not have."""
    named = [*module.named_parameters(remove_duplicate=False)]
    names = {id(parameter): name for name, parameter in reversed(named)}
    return [names.get(id(parameter), "") for parameter in registered]


def copies_of_hollow(module: nn.Module, *, real: bool) -> dict[int, Any]:
    """Return what takes the place of parameters without memory in a copy of a module, by id.

    With `real` they have some numbers, else they are fake tensors again.
    """

    def copied(parameter: nn.Parameter) -> nn.Parameter:
        if not real:
            return hollow_parameter(parameter)
        with without_fake_modes():
            value = torch.full(tuple(parameter.shape), 0.01, device="cpu").to(parameter.dtype)
            return nn.Parameter(value, requires_grad=parameter.requires_grad)

    return {id(p): copied(p) for p in module.parameters() if is_fake(p)}


def is_hollow(module: nn.Module) -> bool:
    """Return whether a module has a parameter without memory."""
    return any(is_fake(parameter) for parameter in module.parameters())
