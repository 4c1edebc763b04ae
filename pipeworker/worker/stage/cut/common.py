"""The attributes of classes and the global variables that the units of one process share.

Each stage has its own process. So a value that one unit leaves in such a variable is missing where
the unit ran on another stage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from pipeworker.worker.stage.cut.contents import MUTABLE, Contents, Search, contents_of, put_back
from pipeworker.worker.stage.cut.objects import is_same
from pipeworker.worker.transport.structure import PLAIN_TYPES

Variable = tuple[Any, str]
"""A class or a module of Python, and a name in it."""
_State = tuple[list[Any], Any, Contents]
"""The objects that show a change of a value, the value, and copies of the contents of objects."""
States = dict[Variable, _State]
_VALUES = (*PLAIN_TYPES, *MUTABLE, tuple, torch.Tensor)
_FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod, property, partial)
_Cache = type(lru_cache(len))
_ABSENT = object()


class CommonVariables:
    """The variables that the classes of modules, and the files of these classes, have.

    Attributes:
        changed: those that units have changed, and their states before.
        last: the states of all when they were last searched.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        others = {torch.__name__, *sys.stdlib_module_names}
        bases = dict.fromkeys(base for one in modules for base in type(one).__mro__)
        kinds = [b for b in bases if b.__module__.partition(".")[0] not in others]
        files = dict.fromkeys(sys.modules.get(kind.__module__) for kind in kinds)
        self._owners: list[Any] = [*kinds, *filter(None, files)]
        self._search = Search({one.__name__ for one in files if one is not None})
        # A class that is no module's, and a function that keeps something, are owned as well.
        owned = {*map(id, kinds)}
        for owner in self._owners:  # also a class within a class
            for one in [*vars(owner).values()]:
                if self._is_class(one) and id(one) not in owned:
                    owned.add(id(one))
                    self._owners.append(one)
        found = [value for owner in self._owners for value in [*vars(owner).values()]]
        self._keeping = {
            id(one) for one in found if isinstance(one, _FUNCTIONS) and self._keeps(one)
        }
        self._caches = [
            one for one in found if isinstance(one, _Cache) and not one.cache_info().currsize
        ]
        self._kinds: dict[int, tuple[type, bool]] = {}
        """Classes, and whether their values are watched, by the id of the class."""
        self.changed: States = {}
        self.last: States = {}
        self._first = self._begun = self.states()

    def begin(self) -> None:
        """Begin a run of the forward."""
        self._begun = self.states()

    def states(self) -> States:
        """Return the states of all variables.

        A variable that has not changed has the state of before: a copy of its value may be large.
        """
        self.last = {
            (owner, name): self._state(value, self.last.get((owner, name)))
            for owner in self._owners
            for name, value in [*vars(owner).items()]
            if not name.startswith("__") and self._is_watched(value)
        }
        return self.last

    def _is_class(self, value: Any) -> bool:
        """Return whether a value is a class that is owned; one with a hash of its own is not."""
        kind: Any = type(value)
        is_usual = kind.__hash__ is type.__hash__
        is_other = isinstance(value, type) and not issubclass(value, nn.Module)
        return is_other and is_usual and value.__module__ in self._search.modules

    def _is_watched(self, value: Any) -> bool:
        kind = type(value)
        if id(kind) not in self._kinds:  # a class may have a hash of its own, or none
            is_watched = isinstance(value, _VALUES) or self._search.is_object(value)
            self._kinds[id(kind)] = kind, is_watched
        return self._kinds[id(kind)][1] or id(value) in self._keeping

    def _keeps(self, function: Any) -> bool:
        """Return whether a function keeps something that may change, as a default value."""
        _, objects = self._search.of(function)
        return any(not isinstance(one, CellType) or _is_plain(one) for one in objects)

    def _state(self, value: Any, last: _State | None) -> _State:
        """Return the state of a value, which is the last one if it has not changed."""
        is_plain = isinstance(value, PLAIN_TYPES)  # most are
        shown, objects = ([value], []) if is_plain else self._search.of(value)
        if last is not None and is_same(last[0], shown):
            return last
        return shown, value, contents_of(objects)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the unit that is called inside the context changes."""
        before = self.states()
        yield
        for variable, was in _differences(before, self.states()).items():
            self.changed.setdefault(variable, was)

    def left_since(self, before: States) -> States:
        """Return the states in `before` of variables that changed later, but not in this run."""
        now = self.states()
        own = _differences(self._begun, now)
        return {one: state for one, state in _differences(before, now).items() if one not in own}

    def unchanged(self, left: States | None = None) -> AbstractContextManager[None]:
        """Undo the changes of units inside the context, and all that is changed there behind it.

        Variables in `left` have the states there.
        """
        return self._having({**(left or {}), **self.changed})

    def as_at_first(self) -> AbstractContextManager[None]:
        """Undo all changes inside the context, and all that is changed there behind it."""
        return self._having(_differences(self._first, self.states()))

    @contextmanager
    def _having(self, states: States) -> Iterator[None]:
        now = self.states()
        _put(states)
        try:
            yield
        finally:
            _put(_differences(now, self.states()))

    def first_changed(self, left: Iterable[Variable] = ()) -> str | None:
        """Return the name of the first variable that a unit has changed, or else in `left`."""
        changed = (*self.changed, *left)
        return next((f"{owner.__name__}.{name}" for owner, name in changed), None)

    def shown(self) -> dict[Variable, list[Any]]:
        """Return the objects that show a change of each variable."""
        return {variable: shown for variable, (shown, _, _) in self.states().items()}

    def restore(self) -> None:
        """Undo all changes since the first; forget what functions have cached since then."""
        _put(_differences(self._first, self.states()))
        for function in self._caches:  # a random table, say, is another one in other processes
            function.cache_clear()


def _is_plain(cell: CellType) -> bool:
    with suppress(ValueError):  # it is empty
        return isinstance(cell.cell_contents, (bool, int, float, type(None)))
    return False


def _differences(before: States, now: States) -> States:
    absent: _State = [_ABSENT], _ABSENT, []
    return {
        variable: before.get(variable, absent)
        for variable in {**before, **now}
        if not is_same(before.get(variable, absent)[0], now.get(variable, absent)[0])
    }


def _put(states: States) -> None:
    for (owner, name), (_, value, contents) in states.items():
        if value is _ABSENT:
            if name in vars(owner):
                delattr(owner, name)
            continue
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)
        put_back(contents)
