"""The pod of a node, and the settings of the Kubernetes engine. Pure."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, replace
from typing import Any

from launcher.spec import JobSpec
from pipeworker.errors import UsageError

RUNS = "/runs"
"""The path of the volume of run directories in a pod."""
FILES = "/job"
"""The path of the folder in a pod that holds a job file that is sent."""
SECRET = "token"
LABEL = "app.kubernetes.io/name", "pipeworker"
"""The label of all objects of all jobs."""
KINDS = ("job", "jobset")
_PORT = 29500
_USER = 10001
_SHUTDOWN = 10  # seconds of the grace period for torchrun itself
_TOKEN = "/etc/pipeworker"
_WEEK = 7 * 24 * 3600
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"(?=[\d.]*[1-9])\d+(\.\d+)?(m|k|[KMGTPE]i?)?")
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9._-]*=[A-Za-z0-9._-]*")
_FORMS = {
    "namespace": (_SUBDOMAIN, "the name of a namespace"),
    "claim": (_SUBDOMAIN, "the name of a volume claim"),
    "service-account": (_SUBDOMAIN, "the name of a service account"),
    "accelerator": (_RESOURCE, "a resource, as nvidia.com/gpu"),
    "cpu": (_QUANTITY, "a quantity, as 8 or 500m"),
    "memory": (_QUANTITY, "a quantity, as 64Gi"),
    "tmp": (_QUANTITY, "a quantity, as 10Gi"),
    "shm": (_QUANTITY, "a quantity, as 10Gi"),
    "node-selector": (_LABEL, "LABEL=VALUE"),
    "job": (re.compile(r"/.+"), "an absolute path in the pods"),
    "image": (re.compile(r"[^\s]+"), "the name of an image"),
}
"""The form of each text that is given, and its name in a message."""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that ``--set NAME=VALUE`` specifies.

    Attributes:
        kind: ``job`` or ``jobset``.
        name: of the job; by default that of its file.
        namespace: by default the one that kubectl is set to.
        claim: of the volume of run directories, to which all nodes write.
        job: the path of the job file in the pods, in the image or on the volume; by default the
            file is sent.
        accelerator: a resource of which each worker gets one, as ``nvidia.com/gpu``.
        cpu: of a pod; by default one for each thread of its workers.
        memory: of a pod; by default what the plan of the job needs.
        tmp: the limit of a pod's files in ``/tmp``.
        shm: the limit of its shared memory; by default its memory.
        node_selector: the label of the nodes, ``LABEL=VALUE``.
        patch: paths of files with parts of the pod template or the job, a line each.
        egress: ``any`` lets the pods connect to what is outside the job, such as data.
        grace: the seconds between SIGTERM and SIGKILL, for a checkpoint.
        retries: how often the job is restarted after losses that are not a node's.
        ttl: the seconds for which the cluster keeps the job after its end.
    """

    image: str = ""
    kind: str = "job"
    name: str = ""
    namespace: str = ""
    claim: str = "pipeworker-runs"
    job: str = ""
    accelerator: str = ""
    cpu: str = ""
    memory: str = ""
    tmp: str = "10Gi"
    shm: str = ""
    node_selector: str = ""
    service_account: str = ""
    egress: str = "job"
    grace: int = 120
    retries: int = 6
    ttl: int = _WEEK
    patch: str = ""

    @staticmethod
    def of(spec: JobSpec) -> Settings:
        """Parse the settings of a job."""
        settings = spec.settings_as(Settings, "kubernetes")
        if not settings.image:
            raise UsageError("--on kubernetes: no image for the pods; use --set image=IMAGE")
        for name, choices in (("kind", KINDS), ("egress", ("job", "any"))):
            if (value := getattr(settings, name)) not in choices:
                raise UsageError(f"--set {name}={value}: must be one of {', '.join(choices)}")
        if settings.grace <= _SHUTDOWN:
            raise UsageError(f"--set grace={settings.grace}: must be more than {_SHUTDOWN} s")
        for name, (form, text) in _FORMS.items():
            value = getattr(settings, name.replace("-", "_"))
            if value and not form.fullmatch(value):
                raise UsageError(f"--set {name}={value}: must be {text}")
        name = settings.name or spec.name
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--set name={name}: must be lower-case letters, digits and -, at most 40"
            )
        return replace(settings, name=name)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects of the job."""
        return {LABEL[0]: LABEL[1], "app.kubernetes.io/instance": self.name}


def template(spec: JobSpec, settings: Settings) -> Object:
    """Return the template of a job's pods."""
    name = settings.name
    label, _, value = settings.node_selector.partition("=")
    account = settings.service_account
    shared = settings.shm or settings.memory or settings.tmp
    token = {"secretName": f"{name}-token", "defaultMode": 0o440}
    volumes: list[Object] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "tmp", "emptyDir": {"sizeLimit": settings.tmp}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}},
        {"name": "token", "secret": token},
    ]
    if not settings.job:
        volumes.append({"name": "job", "configMap": {"name": f"{name}-job"}})
    return {
        "metadata": {"labels": settings.labels},
        "spec": {
            "restartPolicy": "Never",
            **({"subdomain": name} if settings.kind == "job" else {}),
            "terminationGracePeriodSeconds": settings.grace,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"serviceAccountName": account} if account else {}),
            **({"nodeSelector": {label: value}} if label else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(spec, settings)],
            "volumes": volumes,
        },
    }


def _container(spec: JobSpec, settings: Settings) -> Object:
    workers = spec.workers_per_node
    resources = {"cpu": settings.cpu or str(spec.cores_per_node)}
    if settings.memory:
        resources["memory"] = settings.memory
    if settings.accelerator:
        resources[settings.accelerator] = str(workers)
    mounts: list[Object] = [
        {"name": "runs", "mountPath": RUNS},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "token", "mountPath": _TOKEN, "readOnly": True},
    ]
    if not settings.job:
        mounts.append({"name": "job", "mountPath": FILES, "readOnly": True})
    environment = {
        "PIPEWORKER_TOKEN_FILE": f"{_TOKEN}/{SECRET}",
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings.grace - _SHUTDOWN),
    }
    return {
        "name": "node",
        "image": settings.image,
        "command": ["python", "-m", "pipeworker", "node"],
        "args": _args(spec, settings),
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }


def _args(spec: JobSpec, settings: Settings) -> list[str]:
    """Return the arguments of ``pipeworker node``; the pod's index is in its environment.

    Kubernetes expands ``$(NAME)`` in an argument unless it is written ``$$(NAME)``.
    """
    first = f"{settings.name}-{'0' if settings.kind == 'job' else 'node-0-0'}"
    job_file = settings.job or f"{FILES}/{posixpath.basename(spec.job_file)}"
    words = [
        *("--nodes", str(spec.nodes), "--workers", str(spec.workers_per_node)),
        *("--at", f"{first}.{settings.name}", "--port", str(_PORT)),
        "--",  # the rest is for each rank
        *spec.words(job_file, *(() if "--resume" in spec.options else ("--auto-resume",))),
    ]
    return [word.replace("$(", "$$(") for word in words]
