"""Jobs for Kubernetes from the command line, and a cluster that accepts or rejects them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import pipeworker
from support.clusters.kubectl import STORE
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.slow import slow

pytestmark = slow
PATCHES = Path(pipeworker.__file__).parents[1] / "deploy" / "kubernetes" / "patches"
LAUNCH = ("launch", "--on", "kubernetes", "--stages", "2", "--nodes", "2", "--set", "image=image")


@pytest.fixture
def cluster(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the objects of a cluster."""
    program = jobs.folder / "bin" / "kubectl"
    program.parent.mkdir()
    tests = Path(__file__).parents[1]
    path = f"import sys; sys.path.insert(0, {str(tests)!r})"
    code = f"{path}; from support.clusters import kubectl; kubectl.main()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    program.chmod(0o755)
    jobs.write(JOB, "train.py")
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv(STORE, str(jobs.folder / "objects"))
    return jobs.folder / "objects"


def objects(cluster: Path) -> set[str]:
    return set(json.loads(cluster.read_text())) if cluster.exists() else set()


def test_a_job_is_accepted_and_leaves_nothing_when_it_is_cancelled(
    jobs: Jobs, cluster: Path
) -> None:
    done = jobs.pipeworker(*LAUNCH, "train.py")
    assert done.returncode == 0, done.stderr
    assert objects(cluster) == {
        *("job/train", "secret/train-token", "configmap/train-job", "service/train"),
        "networkpolicy/train",
    }
    again = jobs.pipeworker(*LAUNCH, "train.py")
    assert again.returncode == 2
    assert "--set name=train: job train exists already" in again.stderr
    ended = jobs.pipeworker("cancel", "train")
    assert "job train in namespace default is deleted" in ended.stdout, ended.stderr
    assert not objects(cluster)


def test_the_patches_of_a_platform_are_accepted(jobs: Jobs, cluster: Path) -> None:
    patches = [f"patch={PATCHES / name}" for name in ("platform.yaml", "kueue.yaml")]
    words = [word for patch in patches for word in ("--set", patch)]
    done = jobs.pipeworker(*LAUNCH, *words, "train.py")
    assert done.returncode == 0, done.stderr
    job = json.loads(cluster.read_text())["job/train"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("spec: {toleration: []}", "toleration"),
        ("spec: {priorityClassName: [a]}", "priorityClassName"),
        ("spec: {volumes: [{name: more, emptyDir: {}}]}", "an emptyDir has no sizeLimit"),
    ],
)
def test_what_the_cluster_rejects_is_shown_and_nothing_is_made(
    jobs: Jobs, cluster: Path, patch: str, message: str
) -> None:
    path = jobs.write(patch, "patch.yaml")
    done = jobs.pipeworker(*LAUNCH, "--set", f"patch={path}", "train.py")
    assert done.returncode == 1
    assert done.stderr.startswith("error: kubectl apply: ")
    assert message in done.stderr
    assert not objects(cluster)
