"""The request for resources of Ray, and the driver; jobs on a cluster are in ``tests/clusters``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Listener
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.engines import ray
from launcher.engines.ray import CALLER, GroupRequest, Ray
from launcher.engines.ray_driver import AgentActor, Driver
from launcher.spec import JobSpec
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.host.lifetime import command
from pipeworker.wire.lines import Waiting, encode

SPEC = JobSpec(
    "train",
    "/project/train.py",
    workers=3,
    options=("--microbatches", "4", "--device", "cuda"),
    folder="/project",
    run_dir="/runs/a",
    nodes=2,
    environment={"OMP_NUM_THREADS": "2"},
    threads=2,
)


@pytest.fixture(autouse=True)
def without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def spec_with(**settings: str) -> JobSpec:
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    return replace(SPEC, settings=given)


def test_a_bundle_has_what_the_workers_of_its_node_need() -> None:
    assert GroupRequest.of(SPEC).bundles == ({"CPU": 4, "GPU": 2}, {"CPU": 2, "GPU": 1})
    others = spec_with(gpus="0", resources='{"accelerator_type:A100": 0.001}')
    assert GroupRequest.of(others).bundles[1] == {"CPU": 2, "accelerator_type:A100": 0.001}
    assert GroupRequest.of(replace(SPEC, options=())).bundles[0] == {"CPU": 4}


def test_an_agent_for_each_bundle() -> None:
    agents = Ray().agents(SPEC)
    assert [(agent.name, agent.host.workers) for agent in agents] == [
        ("host bundle-0", 2),
        ("host bundle-1", 1),
    ]
    module = agents[1].command.index("launcher.engines.ray_pipe")
    assert agents[1].command[module + 2 : module + 4] == ("1", "python")
    assert agents[1].command[-3:] == ("/project/train.py", "/runs/a/run.json", CALLER)


def test_what_a_dry_run_shows() -> None:
    first, group, agent = Ray().render(SPEC).splitlines()
    assert first == "# Ray at auto"
    assert json.loads(group)["strategy"] == "STRICT_SPREAD"
    assert agent.startswith("python -c ")


def test_the_cluster_and_its_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GroupRequest.of(SPEC).address == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert GroupRequest.of(SPEC).address == "10.0.0.1:6379"
    file = tmp_path / "environment.json"
    file.write_text('{"pip": ["einops"]}')
    request = GroupRequest.of(spec_with(address="10.0.0.2:1", runtime_env=str(file)))
    assert (request.address, request.runtime_env) == ("10.0.0.2:1", {"pip": ["einops"]})
    assert request.environment == {"OMP_NUM_THREADS": "2"}
    seen = GroupRequest.of(replace(SPEC, launcher_address="10.0.0.9"))
    assert seen.environment[CALLER] == "10.0.0.9"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adress": "x"}, "--set adress: no setting of --on ray; must be one of address, gpus"),
        ({"gpus": "two"}, "--set gpus=two: must be a number"),
        ({"address": "ray://a:10001"}, "--on ray: ray://a:10001 is for clients outside"),
        ({"address": "http://a:8265"}, "ray job submit -- pipeworker launch --on ray"),
        ({"runtime_env": "{"}, "--set runtime-env={: not JSON"),
        ({"runtime_env": "nowhere.json"}, "No such file or directory; give JSON, or a file"),
        ({"runtime_env": '{"working_dir": "."}'}, "ray job submit --working-dir FOLDER"),
        ({"resources": '{"TPU": "x"}'}, "--set resources: must be amounts by name"),
        ({"resources": '{"TPU": 0}'}, "--set resources: must be amounts by name"),
    ],
)
def test_a_mistake_is_one_message(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        GroupRequest.of(spec_with(**settings))
    assert message in str(caught.value)


def driven_by(monkeypatch: pytest.MonkeyPatch, script: str) -> Ray:
    """Return an engine whose driver is a shell script, which has read its request."""
    monkeypatch.setattr(ray, "find_spec", lambda _: True)
    line = ["sh", "-c", f"read request; {script}"]
    monkeypatch.setattr(ray, "command", lambda *words: [*line, *words])
    return Ray()


def test_agents_are_served_by_the_driver_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    says = """echo '{"waits": "no room"}'; echo '{"serves": "name"}'; cat"""
    engine = driven_by(monkeypatch, f'{says}; echo "$request" > request')
    with engine.connected(SPEC):
        (_, agent) = engine.agents(SPEC)
        assert agent.command[agent.command.index("1") - 1] == "name"
    assert capsys.readouterr().err == "no room\n"
    assert json.loads(Path("request").read_text())["folder"] == "/project"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("""echo '{"error": "not here", "status": 2}'""", UsageError, "--on ray: not here"),
        ("""echo '{"error": "no room", "status": 1}'""", PipeworkerError, "--on ray: no room"),
        ("echo a >&2; echo b >&2", PipeworkerError, "--on ray: the driver has ended: b"),
        ("exit 4", PipeworkerError, "--on ray: the driver has ended: 4"),
    ],
)
def test_why_a_driver_serves_nothing(
    monkeypatch: pytest.MonkeyPatch, script: str, kind: type, message: str
) -> None:
    with pytest.raises(PipeworkerError) as caught:
        driven_by(monkeypatch, script).connected(SPEC).__enter__()
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_ray_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="--on ray: Ray is not installed; pip install ray"):
        Ray().connected(SPEC).__enter__()


SHOW = """
import os, sys
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
print(os.getcwd(), *(os.environ.get(name) for name in names), sys.stdin.read())
sys.stdout.close()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("devices", ["", "0,1"])
def test_an_agent_has_the_variables_of_the_launcher_and_the_devices_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    actor = AgentActor()
    assert actor.start(["python", "-c", SHOW], str(tmp_path), {"OMP_NUM_THREADS": "3"}) == ""
    actor.write(b"some ")
    actor.write(b"words")
    actor.write(b"")
    shown = b"".join(iter(lambda: actor.read(1), b"")).decode()
    assert shown == f"{tmp_path} 3 None {devices or None} some words\n"
    assert (actor.read(2), actor.status()) == (b"", 137)
    actor.write(b"too late")


class OneProcessRay:
    """The part of Ray that the driver uses; an actor is an object of this process.

    Attributes:
        late: how many times to wait for a node.
        options: of each actor.
        killed: how many actors are.
    """

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, late: int) -> None:
        self.late, self.killed = late, 0
        self.options: list[dict[str, Any]] = []
        state = {"state": "PENDING"}
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "10.0.0.1", placement_group_table=lambda _: state
        )

    def remote(self, kind: type) -> Any:
        def create(**options: Any) -> Any:
            self.options.append(options)
            own = kind()
            methods = {name: _remote(own, name) for name in ("start", "write", "read", "status")}
            return SimpleNamespace(remote=lambda: SimpleNamespace(**methods))

        return SimpleNamespace(options=create)

    def wait(self, futures: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.late -= 1
        return ([], futures) if self.late >= 0 else (futures, [])

    def get(self, future: Callable[[], Any]) -> Any:
        return future()

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def nodes(self) -> list[dict[str, Any]]:
        room = [{"CPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 1.0}]
        return [{"Alive": number < 3, "Resources": one} for number, one in enumerate([*room, {}])]


def _remote(own: Any, name: str) -> Any:
    method = getattr(own, name)
    return SimpleNamespace(remote=lambda *words: lambda: method(*words))


NO_ROOM = (
    "Ray has no room for a lost bundle of 4 CPU, 2 GPU "
    "(its nodes: 2 × 1 CPU, 0 GPU; 1 × 8 CPU, 2 GPU)"
)


@pytest.mark.parametrize(
    ("line", "late", "patience", "output", "errors", "status"),
    [
        (f"cat; echo ${CALLER}; echo wrong >&2; exit 3", 0, 9, "in10.0.0.1\n", "wrong\n", 3),
        ("cat", 1, 9, encode(Waiting(NO_ROOM)).decode() + "in", "", 0),
        ("", 9, -1, encode(Waiting(NO_ROOM)).decode(), f"{NO_ROOM}, for -1 s", 1),
        (None, 0, 9, "", ": /none: No such file or directory", 1),
    ],
)
def test_the_driver_carries_the_lines_of_an_agent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str | None,
    late: int,
    patience: float,
    output: str,
    errors: str,
    status: int,
) -> None:
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=dict)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    request = replace(GroupRequest.of(SPEC), folder=str(tmp_path), patience=patience)
    own, name = OneProcessRay(late), f"tests-{uuid.uuid4().hex}"
    words = ["/none"] if line is None else ["sh", "-c", line]
    pipe = command("launcher.engines.ray_pipe", "", name, "0", *words)
    before = {*threading.enumerate()}
    with (
        Listener(f"\0{name}", "AF_UNIX") as listener,
        Popen(pipe, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process,
    ):
        once: Any = SimpleNamespace(accept=iter([listener.accept()]).__next__)
        with pytest.raises(StopIteration):
            Driver(own, request, "group").serve(once)
        found, problems = process.communicate("in")
    for thread in {*threading.enumerate()} - before:
        thread.join()
    assert (found, process.returncode) == (output, status)
    assert problems.endswith(errors)
    (options,) = own.options
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (4, 2, {})
    where = {"placement_group": "group", "placement_group_bundle_index": 0}
    assert options["scheduling_strategy"] == where
    assert own.killed == 1


def test_an_error_of_ray_without_a_text_has_the_name_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("def init(**options): raise RuntimeError()")
    cloudpickle = "def register_pickle_by_value(module): pass"
    (tmp_path / "ray" / "cloudpickle.py").write_text(cloudpickle)
    request = GroupRequest.of(SPEC)
    ended = subprocess.run(
        command("launcher.engines.ray_driver"),
        input=json.dumps(asdict(request)) + "\n",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    error = f"cannot join Ray at {request.address}: RuntimeError"
    assert json.loads(ended.stdout) == {"error": error, "status": 2}
    assert ended.stderr == ""
