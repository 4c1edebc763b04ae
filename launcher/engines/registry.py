"""The engines by name: all that a module of this folder lists in its ``ENGINES``, and Local."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from launcher import engines
from launcher.engines.engine import AgentCommands, Carrier, Cluster, Engine
from launcher.engines.ssh import Ssh
from launcher.spec import Host, JobSpec, RemoteAgent
from pipeworker.errors import UsageError


class Local(Carrier[AgentCommands]):
    """The engine of a job on this host alone."""

    name = "local"

    def render(self, spec: JobSpec) -> NoReturn:
        raise UsageError("--dry-run requires --on or --hosts: a local job submits nothing")

    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        return (RemoteAgent(Host("", spec.workers)),)


def _engines() -> Iterator[Engine[Any]]:
    for module in pkgutil.iter_modules(engines.__path__, f"{engines.__name__}."):
        yield from getattr(importlib.import_module(module.name), "ENGINES", ())


_FOUND = (Local(), *_engines())
CLUSTERS = {engine.name: engine for engine in _FOUND if isinstance(engine, Cluster)}
"""The engines that ``--on`` names."""


def carrier(environment: Mapping[str, str], *, has_hosts: bool) -> Carrier[Any]:
    """Return the engine of a job that is not submitted; `has_hosts`: the user has named some."""
    if has_hosts:
        return Ssh()
    carriers = [engine for engine in _FOUND if isinstance(engine, Carrier)]
    return next((engine for engine in carriers if engine.is_inside(environment)), Local())
