"""The plan of a cut module, which the worker that reads the data makes for all workers."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.facts.limits import LONGEST_VALUE, MOST_KEYS
from pipeworker.facts.position import Phase
from pipeworker.worker.model.classes import classes_of
from pipeworker.worker.stage.cut.part import plan_of
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.stage.cut.units import CPU
from pipeworker.worker.stage.layers import autocast
from pipeworker.worker.transport.network import CoordinatorStore
from pipeworker.worker.transport.structure import TypeRegistry

if TYPE_CHECKING:
    from pipeworker.worker.loaded_worker import LoadedWorker

_KEY = "cut"


def agreed_plan(loaded: LoadedWorker, module: nn.Module) -> tuple[CutPlan, TypeRegistry]:
    """Return the plan of a module, made here or by the worker that reads the data.

    Raises:
        UsageError: the module cannot be cut, or this worker lacks a class of its values.
    """
    role, settings = loaded.role, loaded.settings
    store = CoordinatorStore(loaded.control.request)
    types = classes_of(loaded.modules())
    if role.rank == role.placement.rank_of(0):
        settings.tracker.set(Phase.READING)
        own = role.options.own_loop
        value = settings.sample if own else loaded.reader.peek().inputs[0]
        if value is None:
            raise UsageError(
                f"model: is {a_type(module)}, whose forward is cut by a run of it; pass an input "
                "as Pipeline(..., sample=...)"
            )
        settings.tracker.set(Phase.SURVEY)
        # Whether `x.float()` is `x` itself depends on it.
        with autocast(CPU.type, role.options.precision) or nullcontext():
            evaluates = bool(role.options.evaluate_every) or role.options.evaluate_first
            plan = plan_of(module, TypeRegistry(types.values()), value, evaluates=evaluates)
        plan.types = [*types]
        _publish(plan, store)
    else:
        settings.tracker.wait(phase=Phase.BUILDING)
        plan = _receive(store)
    if missing := [name for name in plan.types if name not in types]:
        raise UsageError(f"model(): {missing[0]} is known to one worker and not to another")
    return plan, TypeRegistry(types[name] for name in plan.types)


def _publish(plan: CutPlan, store: CoordinatorStore) -> None:
    """Set a plan in the coordinator's store, in as many values as it takes."""
    packed = zlib.compress(plan.pack())
    parts = [packed[at : at + LONGEST_VALUE] for at in range(0, len(packed), LONGEST_VALUE)]
    if len(parts) >= MOST_KEYS:
        raise UsageError(f"model(): the plan of its {len(plan)} layers is too large to be sent")
    for number, part in enumerate(parts):
        store.set(f"{_KEY}/{number}", part)
    store.set(_KEY, str(len(parts)))


def _receive(store: CoordinatorStore) -> CutPlan:
    """Wait for the plan that another worker publishes."""
    count = int(store.get(_KEY))
    return CutPlan.unpack(zlib.decompress(b"".join(store.get(f"{_KEY}/{i}") for i in range(count))))
