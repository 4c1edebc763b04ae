"""What kubectl is asked: a program of the test's own stands in for it."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cluster.kubectl import Kubectl
from launcher.cluster.kubernetes import render
from launcher.spec import Condition, JobSpec
from pipeworker.errors import PipeworkerError, UsageError

PROGRAM = """
    import json, sys
    from pathlib import Path

    folder = Path(sys.argv[1])
    with (folder / "calls").open("a") as calls:
        print(json.dumps([sys.argv[2:], sys.stdin.read()]), file=calls)
    answer = folder / sys.argv[2]
    if answer.exists():
        said = answer.read_text()
        if said.startswith("error"):
            sys.exit(said)
        print(said)
"""
SETTINGS = {"image": "image", "namespace": "team"}


class Cluster:
    """Answers what the files of a folder say, by the first word of a call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._program = folder / "kubectl.py"
        self._program.write_text(textwrap.dedent(PROGRAM))

    def job(self, **settings: str) -> Kubectl:
        spec = JobSpec("train", "/project/train.py", 2, nodes=2, settings={**SETTINGS, **settings})
        line = (sys.executable, "-S", str(self._program), str(self.folder))
        return Kubectl(render(spec, "print()\n"), line)

    def answers(self, word: str, text: Any) -> None:
        said = text if isinstance(text, str) else json.dumps(text)
        (self.folder / word).write_text(said)

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_job_is_submitted_with_a_token_that_no_command_line_shows(cluster: Cluster) -> None:
    job = cluster.job()
    job.submit()
    looked, applied = cluster.calls
    assert looked[0][:3] == ["get", "job", "train"]
    assert applied[0] == ["apply", "-f", "-", "--namespace", "team"]
    secret, *others = yaml.safe_load_all(applied[1])
    assert tuple(others) == job.manifests.objects
    assert len(secret["stringData"]["token"]) == 64
    cluster.job().submit()
    assert next(yaml.safe_load_all(cluster.calls[-1][1])) != secret  # each has its own


def test_a_job_that_exists_is_left_alone(cluster: Cluster) -> None:
    cluster.answers("get", {"status": {}})
    with pytest.raises(UsageError, match="job train exists already: say --set name=NAME"):
        cluster.job().submit()
    assert len(cluster.calls) == 1


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        ("job", {}, Condition("waiting")),
        ("job", {"active": 2}, Condition("running")),
        ("jobset", {"replicatedJobsStatus": [{"active": 1}]}, Condition("running")),
        ("jobset", {"replicatedJobsStatus": [{"active": 0}]}, Condition("waiting")),
        (
            "job",
            {"active": 1, "conditions": [{"type": "FailureTarget", "status": "True"}]},
            Condition("running"),
        ),
        (
            "job",
            {"conditions": [{"type": "Failed", "status": "True", "message": "exit code 1"}]},
            Condition("failed", "exit code 1"),
        ),
        ("job", {"conditions": [{"type": "Complete", "status": "True"}]}, Condition("done")),
        ("jobset", {"conditions": [{"type": "Completed", "status": "True"}]}, Condition("done")),
    ],
)
def test_how_a_job_is(
    cluster: Cluster, kind: str, status: dict[str, Any], expected: Condition
) -> None:
    assert cluster.job(kind=kind).status() == Condition("absent")
    cluster.answers("get", {"status": status})
    assert cluster.job(kind=kind).status() == expected


def test_a_cancelled_job_leaves_nothing_but_its_runs(cluster: Cluster) -> None:
    cluster.job().cancel()
    first, second = (words for words, _ in cluster.calls)
    assert first[:3] == ["delete", "job", "train"]
    assert second[:2] == ["delete", "secret,configmap,service,networkpolicy"]
    assert "app.kubernetes.io/instance=train" in second
    assert all(words[-2:] == ["--namespace", "team"] for words in (first, second))


def test_logs_are_those_of_the_first_pod(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.answers("logs", "step 1")
    assert cluster.job().logs(follow=True) == 0
    assert capfd.readouterr().out == "step 1\n"
    ((words, _),) = cluster.calls
    assert any(word.endswith("job-completion-index=0") for word in words)
    assert "--follow" in words


def test_what_the_cluster_refuses_is_said(cluster: Cluster) -> None:
    cluster.answers("apply", "error: the namespace is not there")
    with pytest.raises(PipeworkerError, match="kubectl apply: error: the namespace is not there"):
        cluster.job().submit()


def test_a_kubectl_that_is_missing_is_said(cluster: Cluster) -> None:
    job = Kubectl(cluster.job().manifests, ("/nowhere/kubectl",))
    for act in (job.submit, job.status, job.logs, job.cancel):
        with pytest.raises(UsageError, match="needs /nowhere/kubectl, set to a cluster: No such"):
            act()
