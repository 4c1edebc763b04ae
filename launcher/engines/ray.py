"""Ray: a placement group with a bundle for each host, and agents that actors start there.

The launcher stays where it is. A process of its own is Ray's driver for the whole job
(:mod:`launcher.engines.ray_driver`), because a driver has threads and keeps connections; the
commands that carry the agents' lines (:mod:`launcher.engines.ray_pipe`) connect to it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import click

from launcher.engines.engine import Carrier, agent_command
from launcher.spec import Host, JobSpec, RemoteAgent
from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.host.lifetime import command
from pipeworker.plan.partition import sizes

CALLER = "PIPEWORKER_RAY_CALLER"
"""The variable with the address of the driver's node, by which the agents reach the launcher."""
_ADDRESS = "RAY_ADDRESS"
_PROXIED = ("ray://", "http://", "https://")
_FILES = "working_dir"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that ``--set NAME=VALUE`` specifies.

    Attributes:
        address: of the cluster, ``HOST:PORT``; by default ``RAY_ADDRESS``, else this node's.
        gpus: of a bundle; by default one for each of its workers with ``--device cuda``, else none.
        resources: further resources of a bundle, as JSON: ``{"accelerator_type:A100": 0.001}``.
        python: the interpreter of the agents; by default that of Ray's workers.
        runtime_env: Ray's description of the workers' surroundings: JSON, or the path of a file.
        patience: seconds to wait for nodes with room, as an autoscaler takes, also after a loss.
    """

    address: str = ""
    gpus: int = -1
    resources: str = ""
    python: str = ""
    runtime_env: str = ""
    patience: int = 600


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The request for a placement group and its agents, which the driver reads once.

    Attributes:
        bundles: the resources of each, by Ray's names; each is on a node of its own.
        folder: in which the agents start.
        environment: variables of the agents.
    """

    address: str
    bundles: tuple[dict[str, float], ...]
    runtime_env: dict[str, Any]
    patience: float
    folder: str
    environment: dict[str, str]

    @staticmethod
    def of(spec: JobSpec) -> GroupRequest:
        """Return what a job asks for."""
        settings = spec.settings_as(Settings, "ray")
        address = settings.address or os.environ.get(_ADDRESS) or "auto"
        if address.startswith(_PROXIED):
            raise UsageError(
                f"--on ray: {address} is for clients outside of the cluster, and the launcher must "
                "be on a node of it; submit it there: ray job submit -- pipeworker launch --on ray "
                "--set address=auto …"
            )
        runtime_env = _json("runtime-env", settings.runtime_env)
        if _FILES in runtime_env:
            raise UsageError(
                f"--set runtime-env: its {_FILES} would not reach this launcher, and the files of "
                "a job have one path on all nodes; submit the launcher with them: ray job submit "
                "--working-dir FOLDER -- pipeworker launch --on ray …"
            )
        environment = dict(spec.environment)
        if spec.launcher_address:
            environment[CALLER] = spec.launcher_address
        return GroupRequest(
            address,
            tuple(_bundle(spec, settings, workers) for workers in sizes(spec.workers, spec.nodes)),
            runtime_env,
            settings.patience,
            spec.folder,
            environment,
        )


class Ray(Carrier):
    """The nodes that a Ray cluster gives."""

    remedy = "share its folder, or send it with `ray job submit --working-dir`"

    def __init__(self) -> None:
        self._driver = ""

    def render(self, spec: JobSpec) -> str:
        """Return the placement group, and the command that each of its actors starts."""
        request = GroupRequest.of(spec)
        group = {"strategy": "STRICT_SPREAD", "bundles": request.bundles}
        agent = shlex.join(_agent_command(spec))
        return f"# Ray at {request.address}\n{json.dumps(group)}\n{agent}\n"

    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        GroupRequest.of(spec)  # finds mistakes
        module, line = "launcher.engines.ray_pipe", _agent_command(spec)
        return tuple(
            RemoteAgent(
                Host(f"bundle-{number}", workers),
                tuple(command(module, "", self._driver, str(number), *line)),
                self.remedy,
            )
            for number, workers in enumerate(sizes(spec.workers, spec.nodes))
        )

    @contextmanager
    def connected(self, spec: JobSpec) -> Iterator[None]:
        """Hold a placement group of the job inside the context."""
        request = GroupRequest.of(spec)
        if find_spec("ray") is None:
            raise UsageError("--on ray: Ray is not installed; pip install ray")
        with tempfile.TemporaryFile("w+") as errors:
            driver = subprocess.Popen(
                command("launcher.engines.ray_driver"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            with driver:
                try:
                    self._driver = _reserve(driver, request, errors)
                    yield
                    _finish(driver)
                finally:
                    driver.kill()  # Ray then frees what it held


def _agent_command(spec: JobSpec) -> list[str]:
    """Return the command of an agent; ``python`` stands for the interpreter of Ray's workers."""
    settings = spec.settings_as(Settings, "ray")
    return agent_command(spec, CALLER, settings.python or "python")


def _finish(driver: subprocess.Popen[str]) -> None:
    """Have the driver return its group to Ray, and end."""
    assert driver.stdin
    driver.stdin.close()
    try:
        driver.wait(timings().exit)
    except subprocess.TimeoutExpired:
        click.echo("warning: Ray does not answer; it frees the job's bundles later", err=True)


def _reserve(driver: subprocess.Popen[str], request: GroupRequest, errors: IO[str]) -> str:
    """Return the address at which the driver serves agents, once it has the group."""
    assert driver.stdin
    assert driver.stdout
    print(json.dumps(asdict(request)), file=driver.stdin, flush=True)
    for line in driver.stdout:
        match json.loads(line):
            case {"waits": text}:
                click.echo(text, err=True)
            case {"serves": address}:
                return str(address)
            case {"error": text, "status": status}:
                kind = UsageError if status == UsageError.exit_status else PipeworkerError
                raise kind(f"--on ray: {text}")
    errors.seek(0)
    reason = errors.read().strip().rpartition("\n")[2]
    raise PipeworkerError(f"--on ray: the driver has ended: {reason or driver.wait()}")


def _bundle(spec: JobSpec, settings: Settings, workers: int) -> dict[str, float]:
    """Return the resources of a bundle for so many workers, by Ray's names."""
    gpus = settings.gpus
    if gpus < 0:
        gpus = workers if spec.option("--device") == "cuda" else 0
    further = _json("resources", settings.resources)
    if not all(type(amount) in (int, float) and amount > 0 for amount in further.values()):
        raise UsageError('--set resources: must be amounts by name, as {"TPU": 4}')
    cores = {"CPU": float(workers * spec.threads)}
    return {**cores, **({"GPU": float(gpus)} if gpus else {}), **further}


def _json(name: str, text: str) -> dict[str, Any]:
    """Return the object of a setting: JSON, or a file that has it."""
    if not text:
        return {}
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--set {name}={text}: {error.strerror}; give JSON, or a file") from None
    except ValueError as error:
        raise UsageError(f"--set {name}={text}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--set {name}={text}: must be a JSON object")
    return found
