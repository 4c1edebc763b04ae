"""The attributes of classes and the global variables that the units of one process share.

Each stage has its own process. So a value that one unit leaves in such a variable is missing where
the unit ran on another stage.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import version_of
from pipeworker.worker.stage.cut.objects import is_same
from pipeworker.worker.transport.structure import PLAIN_TYPES

Variable = tuple[Any, str]
"""A class or a module of Python, and a name in it."""
_State = tuple[list[Any], Any, Any]
"""Objects that show a change of a value, the value, and a copy of it: its content may change."""
_VALUES = (*PLAIN_TYPES, list, dict, set, torch.Tensor)
_ABSENT = object()
_MOST = 1 << 10
"""The length of a list or dict up to which its items are compared."""


class CommonVariables:
    """The variables that the classes of modules, and the files of these classes, have.

    Attributes:
        changed: those that units have changed, and their states before.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        others = {torch.__name__, *sys.stdlib_module_names}
        bases = dict.fromkeys(base for one in modules for base in type(one).__mro__)
        kinds = [b for b in bases if b.__module__.partition(".")[0] not in others]
        files = dict.fromkeys(sys.modules.get(kind.__module__) for kind in kinds)
        self._owners = [*kinds, *filter(None, files)]
        self.changed: dict[Variable, _State] = {}
        self._first = self._states()

    def _states(self) -> dict[Variable, _State]:
        return {
            (owner, name): _state(value)
            for owner in self._owners
            for name, value in [*vars(owner).items()]
            if isinstance(value, _VALUES) and not name.startswith("__")
        }

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the unit that is called inside the context changes."""
        before = self._states()
        yield
        for variable, was in _differences(before, self._states()).items():
            self.changed.setdefault(variable, was)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo the changes of units inside the context, and all that is changed there behind it."""
        with self._having(self.changed):
            yield

    @contextmanager
    def as_at_first(self) -> Iterator[None]:
        """Undo all changes inside the context, and all that is changed there behind it."""
        with self._having(_differences(self._first, self._states())):
            yield

    @contextmanager
    def _having(self, states: dict[Variable, _State]) -> Iterator[None]:
        now = self._states()
        _put(states)
        try:
            yield
        finally:
            _put(_differences(now, self._states()))

    def first_changed(self) -> str | None:
        """Return the name of the first variable that a unit has changed, if there is one."""
        return next((f"{owner.__name__}.{name}" for owner, name in self.changed), None)

    def shown(self) -> dict[Variable, list[Any]]:
        """Return the objects that show a change of each variable."""
        return {variable: shown for variable, (shown, _, _) in self._states().items()}

    def restore(self) -> None:
        """Undo all changes since the first."""
        _put(_differences(self._first, self._states()))


def _state(value: Any) -> _State:
    shown: list[Any] = [value]
    if isinstance(value, torch.Tensor):
        shown.append(version_of(value))
    elif isinstance(value, (list, dict, set)):
        shown.append(len(value))
        if len(value) <= _MOST and not isinstance(value, set):
            shown += [*value, *value.values()] if isinstance(value, dict) else value
    return shown, value, copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _differences(
    before: dict[Variable, _State], now: dict[Variable, _State]
) -> dict[Variable, _State]:
    absent = _state(_ABSENT)
    return {
        variable: before.get(variable, absent)
        for variable in {**before, **now}
        if not is_same(before.get(variable, absent)[0], now.get(variable, absent)[0])
    }


def _put(states: dict[Variable, _State]) -> None:
    for (owner, name), (_, value, content) in states.items():
        if value is _ABSENT:
            if name in vars(owner):
                delattr(owner, name)
            continue
        setattr(owner, name, value)
        if isinstance(value, (list, dict, set)):  # others may have the same object
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
