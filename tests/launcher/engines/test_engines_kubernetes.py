"""Tests of what kubectl is asked: a program of the test's own stands in for it."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.engines import engine
from launcher.engines.kubernetes import Kubernetes, KubernetesJob, find
from launcher.engines.manifests import RUN_DIR, Manifests, render
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
        if text.startswith(("error", "E")):
            sys.exit(text)
        print(text)
"""
SPEC = JobSpec(
    "train",
    "/project/train.py",
    2,
    nodes=2,
    settings={"image": "image", "namespace": "team", "memory": "1Gi"},
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


OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "train"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Cluster(tmp_path)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train", "uid": "7"}}
    found.answer("create", json.dumps(job))
    return found


def test_a_job_is_submitted_with_a_token_that_no_command_line_shows(cluster: Cluster) -> None:
    cluster.submit()
    get, checked, create, apply = cluster.calls
    assert get[0][:3] == ["get", "job", "train"]
    assert checked[0][:6] == ["apply", "--dry-run=server", "-o", "name", "-f", "-"]
    assert len([*yaml.safe_load_all(checked[1])]) == 5  # before any of them is made
    assert create[0][:5] == ["create", "-o", "json", "-f", "-"]
    assert tuple(yaml.safe_load_all(create[1])) == (cluster.manifests.job,)
    assert apply[0] == ["apply", "-f", "-", "--namespace", "team"]
    secret, *others = yaml.safe_load_all(apply[1])
    for one in (secret, *others):  # they are removed with the job
        (owner,) = one["metadata"].pop("ownerReferences")
        assert owner == {**OWNER, "uid": "7"}
    assert tuple(others) == cluster.manifests.objects[:-1]
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
    KubernetesJob("job", "train", "", "/runs/train").follow()
    assert "--namespace" not in capsys.readouterr().out


def test_restarted_pods_find_the_run_directory_on_their_volume(cluster: Cluster) -> None:
    assert cluster.engine.new_run_dir(SPEC).startswith("/runs/train-2")


def test_a_job_that_cannot_be_planned_here_is_submitted_without_a_limit_of_memory(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"image": "image", "job": "/app/train.py"}
    text = cluster.engine.render(replace(SPEC, settings=settings))
    *_, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "memory" not in container["resources"]["limits"]
    assert capsys.readouterr().err == (
        "warning: the memory of the pods is not limited (its job file is in the pods, and cannot "
        "be planned here); use --set memory=SIZE\n"
    )


def test_a_mistake_is_found_before_the_plan_is_made(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"image": "image", "job": "/app/train.py"}
    with pytest.raises(UsageError, match="--nodes 2: must divide the 3 workers"):
        cluster.engine.render(replace(SPEC, workers=3, settings=settings))
    assert capsys.readouterr().err == ""


def test_a_job_that_exists_is_left_unchanged(cluster: Cluster) -> None:
    cluster.answer("get", "job.batch/train")
    with pytest.raises(UsageError, match="--set name=train: job train exists already; specify"):
        cluster.submit()
    assert len(cluster.calls) == 1


def test_a_cancelled_job_is_deleted_with_what_it_owns(cluster: Cluster) -> None:
    assert cluster.submit().cancel() == (
        "job train in namespace team is deleted; its pods save a checkpoint in /runs/train"
    )
    words, _ = cluster.calls[-1]
    assert words[:3] == ["delete", "job", "train"]
    assert words[-2:] == ["--namespace", "team"]


def test_a_job_is_found_by_its_run_directory_or_its_name(cluster: Cluster) -> None:
    job = {
        "name": "train",
        "namespace": "team",
        "annotations": {RUN_DIR: "/runs/train-1"},
    }
    cluster.answer("get", json.dumps({"items": [{"metadata": job}]}))
    for run in ("/runs/train-1", "train"):
        assert find(run) == KubernetesJob("job", "train", "team", "/runs/train-1")
    of_ours = ["--selector", "app.kubernetes.io/name=pipeworker", "-o", "json"]
    assert cluster.calls[-1][0] == ["get", "job", *of_ours]
    assert find("/runs/train-2") is None


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_cluster_need_not_have_jobsets(cluster: Cluster, kind: str) -> None:
    cluster.answer("get", '{"items": []}')
    program = cluster.folder / "kubectl"
    refusal = f'\nif sys.argv[2] == "{kind}":\n    sys.exit("error: no such resource")\n'
    program.write_text(program.read_text().replace("answer =", f"{refusal}answer ="))
    if kind == "jobset":
        assert find("train") is None
    else:
        with pytest.raises(PipeworkerError, match="kubectl get: error: no such resource"):
            find("train")


def test_nothing_is_left_of_a_job_whose_other_objects_are_refused(cluster: Cluster) -> None:
    program = cluster.folder / "kubectl"
    refusal = """
if sys.argv[1] == "apply" and "--dry-run=server" not in sys.argv:
    sys.exit("error: quota")
"""
    program.write_text(program.read_text() + refusal)
    with pytest.raises(PipeworkerError, match="kubectl apply: error: quota"):
        cluster.submit()
    assert cluster.calls[-1][0][:3] == ["delete", "job", "train"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("a: b: c", "not one document of YAML: mapping values are not allowed here"),
        ("- a", "must be a part of a pod template"),
        ("template: {}", "template: a pod template has metadata and spec"),
        ("kind: JobSet", "the job is a Job, not a JobSet"),
    ],
)
def test_a_patch_that_is_none_is_rejected(
    cluster: Cluster, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "patch.yaml"
    if text is not None:
        path.write_text(text)
    spec = replace(SPEC, settings={**SPEC.settings, "patch": str(path)})
    with pytest.raises(UsageError) as caught:
        cluster.engine.render(spec)
    assert message in str(caught.value)
    assert "--set patch" in str(caught.value)


def test_an_error_of_the_cluster_is_shown(cluster: Cluster) -> None:
    cluster.answer("apply", "error: the namespace is not there")
    with pytest.raises(PipeworkerError, match="kubectl apply: error: the namespace is not there"):
        cluster.submit()


def test_a_cluster_that_does_not_answer_is_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CLIENT_SECONDS", 0.1)
    (cluster.folder / "kubectl").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    message = "^kubectl get: the cluster has not answered for 0.1 s$"
    with pytest.raises(PipeworkerError, match=message):
        cluster.submit()


def test_a_line_of_kubectls_log_is_not_shown(cluster: Cluster) -> None:
    logged = 'E1127 06:17:29.932302    8355 memcache.go:265] "Unhandled Error" err="refused"\n'
    for text in (
        f"{logged}{logged}The server was refused",
        f"{logged}The server was refused\n{logged}",
    ):
        cluster.answer("apply", text)
        with pytest.raises(PipeworkerError, match=r"^kubectl apply: The server was refused$"):
            cluster.submit()
    cluster.answer("apply", logged)
    with pytest.raises(PipeworkerError, match="memcache"):
        cluster.submit()


def test_a_missing_kubectl_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="--on kubernetes: cannot run kubectl: No such file"):
        cluster.submit()
