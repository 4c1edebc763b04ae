"""``type()`` of a stand-in, in the code of a model: the class that the tensor has elsewhere.

Code that compares ``type(x)`` with a class would otherwise take another branch on each stage.
"""

from __future__ import annotations

import sys
from types import FunctionType, GenericAlias
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import is_fake


class _Meta(type):
    """The class of the ``type`` of a model's code, which hides stand-ins.

    In all else it does the same as the builtin, and takes its place: ``type(type(x)) is type``.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a class that the model's code derives from `type`
            return type.__call__(cls, *args, **kwargs)
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and is_fake(args[0]):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        found = type(*args, **kwargs)
        return cls if found is type else found

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else type.__hash__(cls)

    def __getitem__(cls, item: Any) -> GenericAlias:
        return type[item]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type) if cls is _Type else type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type) if cls is _Type else type.__subclasscheck__(cls, subclass)


class _Type(type, metaclass=_Meta):
    """The class that the name ``type`` stands for in the code of a model that is cut."""


def hide_stand_ins(module: nn.Module) -> None:
    """Have ``type()`` hide stand-ins, in the files whose classes the module is made of."""
    not_of_users = {torch.__name__, *sys.stdlib_module_names}
    for found in {base for one in module.modules() for base in type(one).__mro__}:
        if found.__module__.partition(".")[0] not in not_of_users:
            for function in vars(found).values():
                if isinstance(function, FunctionType):
                    function.__globals__.setdefault("type", _Type)
