"""Forwards of modules inside a backward, as those that ``torch.utils.checkpoint`` repeats.

The schedule decides which forwards of other micro-batches come before such a forward. So it may
leave nothing that they would see.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pipeworker.errors import UsageError
from pipeworker.worker.internals import BatchNorm, buffers_of, has_backward_hooks
from pipeworker.worker.stage.recompute import set_recomputing
from pipeworker.worker.stage.slots import Copies, Slot, copy_of, get_slot, set_slot
from pipeworker.worker.stage.values import WATCHED, checksums, is_checked

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of a batch norm, which a class of the user's own may have others beside."""
_HOOKED = r"Using `torch\.compile\(module\)` when there are global hooks"
"""torch warns of the hook here when a compiled module runs in a backward, where it does no harm."""


class RepeatedForwards:
    """The forwards of a stage's modules that run inside its backwards.

    Batch norms have copies of their statistics there, which do not enter what they compute in
    training: in the backwards that are checked all of them, else those that ran in one before. A
    backward may depend on other buffers, so their change is an error. What a hook on the backward
    leaves in a buffer of a module without a forward there is no such change. A forward of a batch
    norm may also be no call of the module, as in compiled code or by ``F.batch_norm``: the change
    of its statistics shows it, unless the module has hooks on its backward.

    Args:
        layers: the layers of the stage.
        name_of: returns the name of a module in messages.
    """

    def __init__(self, layers: Sequence[nn.Module], name_of: Callable[[nn.Module], str]) -> None:
        modules = nn.ModuleList(layers).modules()
        self._norms = dict.fromkeys(one for one in modules if isinstance(one, BatchNorm))
        self._name_of = name_of
        self._seen: dict[nn.Module, None] = {}
        self._backwards = 0
        warnings.filterwarnings("ignore", _HOOKED)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Undo what forwards inside the context, in which a backward runs, change.

        Raises:
            UsageError: a forward has changed a buffer of another module than a batch norm.
        """
        self._backwards += 1
        is_due = is_checked(self._backwards, WATCHED)
        statistics = {
            slot: get_slot(slot)
            for norm in (self._norms if is_due else self._seen)
            if norm in self._norms
            for slot in _slots(norm)
            if slot[1] in _STATISTICS
        }
        before = {
            slot: checksums(get_slot(slot))
            for one in (self._seen if is_due else ())
            for slot in _slots(one)
            if slot not in statistics
        }
        copies: Copies = {}
        unseen: list[nn.Module] = []
        for slot, value in statistics.items():
            set_slot(slot, copy_of(value, copies))
        handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()
            set_recomputing(value=False)
            for slot, value in statistics.items():
                now = get_slot(slot)
                set_slot(slot, value)
                if slot[0] in self._seen or value is None or torch.equal(now, value):
                    continue
                if has_backward_hooks(slot[0]):
                    with torch.no_grad():
                        value.copy_(now)  # a hook on the backward has changed it
                else:
                    unseen.append(slot[0])
            self._seen |= dict.fromkeys(unseen)
        for (module, key), numbers in before.items():
            if checksums(get_slot((module, key))) != numbers:
                raise UsageError(
                    f"{self._name_of(module)}: its forward, repeated inside a backward as "
                    f"torch.utils.checkpoint does, changes the buffer {key} at a time that depends "
                    "on the schedule, and with it the numbers; leave that checkpoint out, since "
                    "--recompute does the same for whole stages"
                )

    def _note(self, module: nn.Module, _: Any) -> None:
        """Note a module whose forward begins; a selective checkpoint forbids operations here."""
        # In this thread: on an accelerator it is another one, which runs nothing but backwards.
        set_recomputing(value=True)
        # The modules within one of TorchScript run without hooks.
        scripted = isinstance(module, torch.jit.ScriptModule)
        for one in module.modules() if scripted else (module,):
            if one not in self._seen and _slots(one):
                self._seen[one] = None


def _slots(module: nn.Module) -> list[Slot]:
    return [(module, key) for key, _ in buffers_of(module).items()]
