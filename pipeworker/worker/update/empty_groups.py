"""Optimizers for which a stage has no parameters.

A job chooses parameters by what they are, for several optimizers or groups, and a stage may have
none of one kind. torch rejects an optimizer without parameters, and a group without parameters
beside groups with names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Optimizer = torch.optim.Optimizer


@contextmanager
def accepting_empty_groups() -> Iterator[None]:
    """Let optimizers that are made inside the context have groups without parameters alone."""
    init, add = Optimizer.__init__, Optimizer.add_param_group

    def init_empty(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        params = _listed(params)
        init(self, [{"params": []}] if params == [] else params, defaults)

    def add_empty(self: Optimizer, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"] = _listed(param_group["params"])
            if params == [] and any("param_names" in group for group in self.param_groups):
                param_group["param_names"] = []
            elif isinstance(params, list) and any(isinstance(one, tuple) for one in params):
                for group in self.param_groups:
                    if not group["params"]:
                        group["param_names"] = []
        add(self, param_group)

    Optimizer.__init__ = init_empty  # type: ignore[method-assign]
    Optimizer.add_param_group = add_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = init  # type: ignore[method-assign]
        Optimizer.add_param_group = add  # type: ignore[method-assign]


def has_parameters(optimizer: Optimizer) -> bool:
    """Return whether any group of an optimizer has a parameter."""
    return any(group["params"] for group in optimizer.param_groups)


def _listed(params: Any) -> Any:
    """Return parameters as a list; what torch rejects is returned as it is."""
    rejected = isinstance(params, (torch.Tensor, set)) or not hasattr(params, "__iter__")
    return params if rejected else list(params)
