"""Tests of what Ray is asked for; ``tests/clusters/test_ray.py`` runs jobs on a cluster of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.engines.ray import CALLER, GroupRequest, Ray
from launcher.spec import JobSpec
from pipeworker.errors import UsageError

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
    ],
)
def test_a_mistake_is_one_message(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        GroupRequest.of(spec_with(**settings))
    assert message in str(caught.value)
