"""A node of a job as a pod of Kubernetes, and what can be said of it. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from launcher.spec import JobSpec
from pipeworker.errors import UsageError

RUNS = "/runs"
"""Where the volume of run directories is."""
FILES = "/job"
"""Where the job file is, when it is sent."""
SECRET = "token"
KINDS = ("job", "jobset")
_PORT = 29500
_USER = 10001
_SHUTDOWN = 10  # seconds of the grace period that are torchrun's

_Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``--set NAME=VALUE`` says.

    Attributes:
        image: of the containers.
        kind: ``job`` or ``jobset``.
        name: of the job; that of its file by default.
        namespace: the one that kubectl is set to by default.
        claim: the volume claim of run directories, which all nodes write.
        job: path of the job file in the pods, in the image or on the volume; else it is sent.
        accelerator: the resource each worker gets one of, as ``nvidia.com/gpu``.
        cpu: of a pod; by default one for each thread of its workers.
        memory: of a pod; without a bound by default.
        node_selector: ``LABEL=VALUE`` of the nodes.
        service_account: of the pods.
        egress: ``any`` lets the pods reach what is not of the job, as data elsewhere.
        grace: seconds for a checkpoint between SIGTERM and SIGKILL.
        retries: how often the job begins anew after losses that no node had.
    """

    image: str
    kind: str = "job"
    name: str = ""
    namespace: str = ""
    claim: str = "pipeworker-runs"
    job: str = ""
    accelerator: str = ""
    cpu: str = ""
    memory: str = ""
    node_selector: str = ""
    service_account: str = ""
    egress: str = "job"
    grace: int = 120
    retries: int = 6

    @staticmethod
    def of(said: Mapping[str, str]) -> Settings:
        """Read what was said.

        Raises:
            UsageError: a setting is unknown, is missing, or is none of those it may be.
        """
        known = {field.name.replace("_", "-"): field for field in fields(Settings)}
        if unknown := sorted(said.keys() - known.keys()):
            raise UsageError(f"--set {unknown[0]}: must be one of {', '.join(known)}")
        if not said.get("image"):
            raise UsageError("--on kubernetes needs --set image=IMAGE: what the pods run")
        values: dict[str, Any] = {}
        for name, text in said.items():
            number = known[name].type == "int"
            if number and not (text.isascii() and text.isdigit() and len(text) < 7):
                raise UsageError(f"--set {name}={text}: must be a number")
            values[known[name].name] = int(text) if number else text
        settings = Settings(**values)
        for name, value, choices in (
            ("kind", settings.kind, KINDS),
            ("egress", settings.egress, ("job", "any")),
        ):
            if value not in choices:
                raise UsageError(f"--set {name}={value}: must be one of {', '.join(choices)}")
        if settings.grace <= _SHUTDOWN:
            raise UsageError(f"--set grace={settings.grace}: must be more than {_SHUTDOWN} s")
        if settings.node_selector and "=" not in settings.node_selector:
            raise UsageError(f"--set node-selector={settings.node_selector}: must be LABEL=VALUE")
        return settings


def labels(name: str) -> dict[str, str]:
    """Of all that is of a job."""
    return {"app.kubernetes.io/name": "pipeworker", "app.kubernetes.io/instance": name}


def template(spec: JobSpec, settings: Settings, name: str) -> dict[str, Any]:
    """What each pod of a job is."""
    label, _, value = settings.node_selector.partition("=")
    volumes: list[_Object] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if not settings.job:
        volumes.append({"name": "job", "configMap": {"name": f"{name}-job"}})
    return {
        "metadata": {"labels": labels(name)},
        "spec": {
            "restartPolicy": "Never",
            **({"subdomain": name} if settings.kind == "job" else {}),
            "terminationGracePeriodSeconds": settings.grace,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **(
                {"serviceAccountName": settings.service_account} if settings.service_account else {}
            ),
            **({"nodeSelector": {label: value}} if label else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(spec, settings, name)],
            "volumes": volumes,
        },
    }


def _container(spec: JobSpec, settings: Settings, name: str) -> _Object:
    workers = spec.workers_per_node
    resources = {"cpu": settings.cpu or str(spec.cores_per_node)}
    if settings.memory:
        resources["memory"] = settings.memory
    if settings.accelerator:
        resources[settings.accelerator] = str(workers)
    mounts: list[_Object] = [
        {"name": "runs", "mountPath": RUNS},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if not settings.job:
        mounts.append({"name": "job", "mountPath": FILES, "readOnly": True})
    secret = {"secretKeyRef": {"name": f"{name}-token", "key": SECRET}}
    plain = {
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings.grace - _SHUTDOWN),
    }
    return {
        "name": "node",
        "image": settings.image,
        "command": ["python", "-m", "pipeworker", "node"],
        "args": _args(spec, settings, name),
        "env": [
            {"name": "PIPEWORKER_TOKEN", "valueFrom": secret},
            *({"name": key, "value": value} for key, value in plain.items()),
        ],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }


def _args(spec: JobSpec, settings: Settings, name: str) -> list[str]:
    """Of ``pipeworker node``; the pod's index is in its environment.

    ``$(NAME)`` in an argument is Kubernetes' own unless it is written ``$$(NAME)``.
    """
    first = f"{name}-0" if settings.kind == "job" else f"{name}-node-0-0"
    run_dir = spec.run_dir or f"{RUNS}/{name}"
    if not posixpath.normpath(run_dir).startswith(f"{RUNS}/"):
        raise UsageError(f"--run-dir {run_dir}: must be in {RUNS}, the volume of the pods")
    job_file = settings.job or f"{FILES}/{posixpath.basename(spec.job_file)}"
    words = [
        *("--nodes", str(spec.nodes), "--workers", str(spec.workers_per_node)),
        *("--at", f"{first}.{name}", "--port", str(_PORT)),
        "--",  # what follows is of each rank
        *spec.words,
        *("--run-dir", run_dir, "--go-on", job_file),
        *(("--", *spec.arguments) if spec.arguments else ()),
    ]
    return [word.replace("$(", "$$(") for word in words]
