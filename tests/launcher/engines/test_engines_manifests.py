"""Tests of the objects for Kubernetes: by the files in ``deploy``, and by published schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import pipeworker
from launcher.engines.manifests import Manifests, documents, render
from launcher.engines.pod import KINDS, Settings
from launcher.spec import JobSpec
from pipeworker.errors import UsageError

DEPLOY = Path(pipeworker.__file__).parents[1] / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.37")
"""The oldest version that has all fields in use, and the newest with published schemas."""
SPEC = JobSpec(
    "train",
    "/project/train.py",
    workers=4,
    options=("--microbatches", "16", "--checkpoint-every", "10m"),
    nodes=2,
    settings={
        "image": "registry.example.com/pipeworker:cuda",
        "job": "/runs/train.py",
        "accelerator": "nvidia.com/gpu",
        "cpu": "8",
        "memory": "64Gi",
    },
)


def spec_with(**settings: str) -> JobSpec:
    """Return the job with other settings."""
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    return replace(SPEC, settings={"image": "image", **given})


def pod_of(manifests: Manifests) -> Any:
    spec = manifests.objects[-1]["spec"]
    if manifests.settings.kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"]


def validate(found: Any) -> None:
    """Check an object by its published schema; unknown fields are errors."""
    if found["kind"] != "JobSet":
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
        return
    # Takes half a second, in each of pytest's processes if a module did so.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    read = JobsetV1alpha2JobSet.from_dict(found)
    assert read is not None
    assert read.to_dict() == found  # unknown fields are left out
    rules = found["spec"]["failurePolicy"]["rules"]
    described = type(read.spec.failure_policy.rules[0]).model_fields["action"].description
    assert all(f"{rule['action']}," in f"{described}," for rule in rules)
    for job in found["spec"]["replicatedJobs"]:
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job["template"]})


@pytest.fixture(scope="module", autouse=True)
def _definitions_are_read_once() -> Iterator[None]:
    """Else each validation reads a megabyte of JSON."""
    with pytest.MonkeyPatch.context() as patch:
        read = kubernetes_validate.utils.schema_contents
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(read))
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_in_deploy_are_the_rendered_ones(kind: str) -> None:
    spec = replace(SPEC, settings={**SPEC.settings, "kind": kind})
    assert render(spec).text == (DEPLOY / f"{kind}.yaml").read_text()


def test_the_job_for_a_queue_in_deploy_is_the_rendered_one() -> None:
    patch = yaml.safe_load((DEPLOY / "patches" / "kueue.yaml").read_text())
    assert render(SPEC, [patch]).text == (DEPLOY / "queued-job.yaml").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_rendered_objects_have_the_published_schemas(kind: str) -> None:
    everything = spec_with(
        kind=kind,
        name="other",
        namespace="team",
        claim="disk",
        memory="1Gi",
        grace="30",
        node_selector="zone=a",
        service_account="me",
        egress="any",
        retries="0",
        ttl="60",
        tmp="1Gi",
        shm="2Gi",
        patch="patch.yaml",
    )
    for spec in (SPEC, spec_with(kind=kind), everything):
        manifests = render(replace(spec, source="print()\n"))
        for found in (*manifests.objects, manifests.secret("x" * 16)):
            validate(found)
            assert found["metadata"]["name"].startswith(manifests.settings.name)
            assert found["metadata"].get("namespace", "") == manifests.settings.namespace
    assert {field.replace("_", "-") for field in Settings.__slots__} == {
        *everything.settings,
        "job",
        "accelerator",
        "cpu",
    }


def test_the_other_files_in_deploy_have_the_published_schemas() -> None:
    found = {
        path.name: list(yaml.safe_load_all(path.read_text())) for path in DEPLOY.glob("*.yaml")
    }
    assert found.keys() == {"job.yaml", "jobset.yaml", "queued-job.yaml", "volume.yaml"}
    for objects in found.values():
        for each in objects:
            validate(each)
    (claim,) = found["volume.yaml"]
    assert claim["metadata"]["name"] == Settings("image").claim


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifests: manifests.objects[-1]["spec"].update(unknown=1),
        lambda manifests: manifests.objects[-1]["spec"].update(suspend="yes"),
        lambda manifests: pod_of(manifests)["containers"][0].update(unknown=1),
        lambda manifests: pod_of(manifests).update(terminationGracePeriodSeconds="long"),
        lambda manifests: pod_of(manifests).pop("containers"),
    ],
)
def test_an_invalid_object_is_detected(kind: str, spoil: Callable[[Manifests], object]) -> None:
    manifests = render(spec_with(kind=kind, job="/job.py"))
    spoil(manifests)
    with pytest.raises((kubernetes_validate.ValidationError, ValueError, AssertionError)):
        validate(manifests.objects[-1])


def test_each_setting_is_in_its_field_of_a_pod() -> None:
    settings = {"claim": "disk", "grace": "30", "tmp": "1Gi", "shm": "2Gi"}
    pod = pod_of(render(spec_with(**settings, node_selector="zone=a", service_account="me")))
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("me", {"zone": "a"})
    assert pod["terminationGracePeriodSeconds"] == 30
    volumes = {one.pop("name"): one for one in pod["volumes"]}
    assert volumes["runs"] == {"persistentVolumeClaim": {"claimName": "disk"}}
    assert volumes["tmp"] == {"emptyDir": {"sizeLimit": "1Gi"}}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    mounts = pod["containers"][0]["volumeMounts"]
    assert {one["name"] for one in mounts if one.get("readOnly")} == {"token", "job"}
    assert {one["mountPath"] for one in mounts} >= {"/runs", "/tmp", "/dev/shm"}
    plain = pod_of(render(spec_with()))
    assert not {"serviceAccountName", "nodeSelector"} & plain.keys()


def test_the_token_is_not_shown() -> None:
    manifests = render(SPEC)
    token = "a secret of the test"
    assert token not in manifests.text
    assert token in documents((manifests.secret(token),))
    pod, secret = pod_of(manifests), manifests.secret(token)
    variables = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "token"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "token"]
    folder, _, key = variables["PIPEWORKER_TOKEN_FILE"].rpartition("/")
    assert folder == mount["mountPath"]
    assert secret["metadata"]["name"] == volume["secret"]["secretName"] == "train-token"
    assert secret["stringData"] == {key: token}
    assert "create secret generic train-token \\\n" in manifests.text
    there = render(spec_with(namespace="team")).text
    assert "create secret generic train-token --namespace team \\\n" in there


def test_the_job_file_is_sent_as_it_is() -> None:
    source = "import torch\n\ttab = '${X} ä'  \n# no newline at the end"
    manifests = render(replace(spec_with(), source=source))
    shown = next(iter(yaml.safe_load_all(manifests.text)))
    assert shown["data"] == {"train.py": source}
    assert "/job/train.py" in pod_of(manifests)["containers"][0]["args"]
    with pytest.raises(UsageError, match=r"train\.py: too long to be sent"):
        render(replace(spec_with(), source="ä" * 500_001))


@pytest.mark.parametrize("kind", KINDS)
def test_a_platforms_patches_are_merged_and_valid(kind: str) -> None:
    folder = DEPLOY / "patches"
    platform, queue = (
        yaml.safe_load((folder / name).read_text()) for name in ("platform.yaml", "kueue.yaml")
    )
    queue["kind"] = "Job" if kind == "job" else "JobSet"
    manifests = render(spec_with(kind=kind, memory="1Gi"), [platform, queue])
    validate(manifests.job)
    before, pod = pod_of(render(spec_with(kind=kind, memory="1Gi"))), pod_of(manifests)
    assert manifests.job["metadata"]["labels"] == {
        **manifests.settings.labels,
        "kueue.x-k8s.io/queue-name": "training",
    }
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["securityContext"] == {
        **before["securityContext"],
        **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 20001),
    }
    (old,), (new,) = before["containers"], pod["containers"]
    assert new["env"][:-1] == old["env"]
    assert new["env"][-1]["name"] == "BUCKET_KEY"
    assert new["args"] == old["args"]
    assert [mount["name"] for mount in new["volumeMounts"]][-1] == "data"
    assert pod["volumes"][:-1] == before["volumes"]


def test_every_empty_folder_has_a_limit_and_every_pod_its_memory() -> None:
    pod = pod_of(render(spec_with(memory="3Gi")))
    limits = {v["name"]: v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if "emptyDir" in v}
    assert limits == {"tmp": "10Gi", "shm": "3Gi"}
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": "2", "memory": "3Gi"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_rights_beyond_training(kind: str) -> None:
    manifests = render(spec_with(kind=kind))
    pod = pod_of(manifests)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    (policy,) = [found for found in manifests.objects if found["kind"] == "NetworkPolicy"]
    ours = {"podSelector": policy["spec"]["podSelector"]}
    assert policy["spec"]["ingress"] == [{"from": [ours]}]
    assert policy["spec"]["egress"][0] == {"to": [ours]}
    assert [port["port"] for port in policy["spec"]["egress"][1]["ports"]] == [53, 53]
    assert len(policy["spec"]["egress"]) == 2


def test_the_pods_meet_at_the_name_of_the_first_one() -> None:
    for kind, first in (("job", "train-0.train"), ("jobset", "train-node-0-0.train")):
        manifests = render(spec_with(kind=kind))
        args = pod_of(manifests)["containers"][0]["args"]
        assert args[args.index("--at") + 1] == first
    (service,) = [f for f in render(spec_with()).objects if f["kind"] == "Service"]
    assert service["metadata"]["name"] == pod_of(render(spec_with()))["subdomain"] == "train"
    assert service["spec"]["clusterIP"] == "None"


def test_kubernetes_does_not_expand_arguments() -> None:
    spec = replace(SPEC, arguments=("$(HOME)", "a b"), run_dir="/runs/deep/one")
    args = pod_of(render(spec))["containers"][0]["args"]
    assert args[-6:] == [
        "/runs/deep/one",
        "--auto-resume",
        "/runs/train.py",
        "--",
        "$$(HOME)",
        "a b",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            replace(SPEC, settings={}),
            "no image for the pods; use --set image=IMAGE",
        ),
        (
            spec_with(imag="x"),
            "--set imag: no setting of --on kubernetes; must be one of image, kind, name",
        ),
        (spec_with(kind="pod"), "--set kind=pod: must be one of job, jobset"),
        (spec_with(egress="none"), "--set egress=none: must be one of job, any"),
        (spec_with(grace="1m"), "--set grace=1m: must be a number"),
        (spec_with(grace="10"), "--set grace=10: must be more than 10 s"),
        (spec_with(node_selector="a"), "--set node-selector=a: must be LABEL=VALUE"),
        (spec_with(memory="64 GB"), "--set memory=64 GB: must be a quantity, as 64Gi"),
        (spec_with(memory="0Gi"), "--set memory=0Gi: must be a quantity, as 64Gi"),
        (spec_with(accelerator="gpu"), "--set accelerator=gpu: must be a resource, as nvidia"),
        (spec_with(namespace="a_b"), "--set namespace=a_b: must be the name of a namespace"),
        (spec_with(job="train.py"), "--set job=train.py: must be an absolute path in the pods"),
        (spec_with(image="a b"), "--set image=a b: must be the name of an image"),
        (spec_with(name="A"), "--set name=A: must be lower-case letters"),
        (spec_with(name="a" * 41), "at most 40"),
        (replace(SPEC, workers=5), "--nodes 2: must divide the 5 workers"),
        (replace(SPEC, run_dir="/project/runs/a"), "--run-dir /project/runs/a: must be in /runs"),
        (replace(SPEC, run_dir="/runs"), "--run-dir /runs: must be in /runs"),
    ],
)
def test_a_mistake_is_one_message(spec: JobSpec, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(spec)
    assert message in str(caught.value)
