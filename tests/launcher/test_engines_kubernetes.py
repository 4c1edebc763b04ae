"""Tests of what kubectl is asked: a program of the test's own stands in for it."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from launcher.engines.kubernetes import Kubernetes, KubernetesJob
from launcher.engines.manifests import Manifests, render
from launcher.spec import JobSpec
from pipeworker.errors import PipeworkerError, UsageError

PROGRAM = f"""\
    #!{sys.executable} -S
    import json, sys
    from pathlib import Path

    folder = Path(__file__).parent
    with (folder / "calls").open("a") as calls:
        print(json.dumps([sys.argv[1:], sys.stdin.read()]), file=calls)
    answer = folder / sys.argv[1]
    if answer.exists():
        text = answer.read_text()
        if text.startswith("error"):
            sys.exit(text)
        print(text)
"""
SPEC = JobSpec(
    "train",
    "/project/train.py",
    2,
    nodes=2,
    settings={"image": "image", "namespace": "team"},
    source="print()\n",
)


class Cluster:
    """A program that answers the text of a file, which the first word of a call names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Kubernetes()
        program = folder / "kubectl"
        program.write_text(textwrap.dedent(PROGRAM))
        program.chmod(0o755)

    @property
    def manifests(self) -> Manifests:
        return render(SPEC)

    def submit(self) -> KubernetesJob:
        return self.engine.submit(SPEC)

    def answer(self, word: str, text: str) -> None:
        (self.folder / word).write_text(text)

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Cluster(tmp_path)


def test_a_job_is_submitted_with_a_token_that_no_command_line_shows(cluster: Cluster) -> None:
    cluster.submit()
    get, apply = cluster.calls
    assert get[0][:3] == ["get", "job", "train"]
    assert apply[0] == ["apply", "-f", "-", "--namespace", "team"]
    secret, *others = yaml.safe_load_all(apply[1])
    assert tuple(others) == cluster.manifests.objects
    assert len(secret["stringData"]["token"]) == 64
    cluster.submit()
    assert next(yaml.safe_load_all(cluster.calls[-1][1])) != secret  # each job has its own


def test_a_submitted_job_shows_how_to_follow_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.submit().follow() == 0
    first, *commands = capsys.readouterr().out.splitlines()
    assert first == "job train is submitted; its run directory is /runs/train"
    assert [line.split()[:2] for line in commands] == [
        ["kubectl", "get"],
        ["kubectl", "logs"],
        ["kubectl", "delete"],
    ]
    assert all("--namespace team" in line for line in commands)


def test_a_job_that_exists_is_left_unchanged(cluster: Cluster) -> None:
    cluster.answer("get", "job.batch/train")
    with pytest.raises(UsageError, match="--set name=train: job train exists already; specify"):
        cluster.submit()
    assert len(cluster.calls) == 1


def test_a_cancelled_job_leaves_nothing_but_its_runs(cluster: Cluster) -> None:
    cluster.submit().cancel()
    first, second = (words for words, _ in cluster.calls[2:])
    assert first[:3] == ["delete", "job", "train"]
    assert second[:2] == ["delete", "secret,configmap,service,networkpolicy"]
    assert "app.kubernetes.io/instance=train" in second
    assert all(words[-2:] == ["--namespace", "team"] for words in (first, second))


def test_an_error_of_the_cluster_is_shown(cluster: Cluster) -> None:
    cluster.answer("apply", "error: the namespace is not there")
    with pytest.raises(PipeworkerError, match="kubectl apply: error: the namespace is not there"):
        cluster.submit()


def test_a_missing_kubectl_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="--on kubernetes: cannot run kubectl: No such file"):
        cluster.submit()
