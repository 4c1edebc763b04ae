"""The Kubernetes objects of a job: a pod a node, in an indexed Job or a JobSet. Pure.

A pod runs ``pipeworker node``. After its exit statuses 1 and 2, errors of the user, the job has
failed. After 75, the loss of a process, all pods are restarted, and the run resumes from its last
checkpoint. A lost node, or a pod that was asked to end, does not count as an attempt.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.engines.patch import merge
from launcher.engines.pod import RUNS, SECRET, Object, Settings, template
from launcher.spec import JobSpec
from pipeworker.errors import UsageError

RUN_DIR = "pipeworker/run-dir"
"""The annotation of a job with its run directory."""
_USER_ERRORS = [1, 2]
_TERMINATED = [130, 143]
_MAX_SOURCE = 1_000_000  # bytes in a ConfigMap, which holds 1 MiB


@dataclass(frozen=True, slots=True)
class Manifests:
    """The objects of a job.

    Attributes:
        run_dir: the run directory, on the volume of the pods.
        objects: in the order in which they are made; the last one is the job. The token is not
            among them: :meth:`secret` makes it when they are applied.
    """

    settings: Settings
    run_dir: str
    objects: tuple[Object, ...]

    @property
    def job(self) -> Object:
        """The job itself."""
        return self.objects[-1]

    def secret(self, token: str) -> Object:
        """Return the object that gives the token to the pods of this job."""
        content = {"type": "Opaque", "stringData": {SECRET: token}}
        return _object("v1", "Secret", self.settings, "-token", **content)

    def owned(self, token: str, job: Object) -> tuple[Object, ...]:
        """Return the other objects, which are removed with the job that the cluster has made."""
        metadata = job["metadata"]
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"]}
        owner["uid"] = metadata["uid"]
        return tuple(
            {**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}}
            for one in (self.secret(token), *self.objects[:-1])
        )

    @property
    def text(self) -> str:
        """The objects as YAML, for ``kubectl apply -f``."""
        name, namespace = self.settings.name, self.settings.namespace
        where = f" --namespace {namespace}" if namespace else ""
        return (
            f"# The token is a secret. pipeworker makes it when it submits the job; by hand:\n"
            f"#   kubectl create secret generic {name}-token{where} \\\n"
            f'#     --from-literal {SECRET}="$(openssl rand -hex 32)"\n'
        ) + documents(self.objects)


def render(spec: JobSpec, patches: Sequence[Object] = ()) -> Manifests:
    """Return the objects of a job; with its file, unless the pods have that (``--set job=PATH``).

    Each patch is merged into the pod template or, if it has a `kind`, into the job itself.
    """
    settings = Settings.of(spec)
    if spec.workers % spec.nodes:
        raise UsageError(
            f"--nodes {spec.nodes}: must divide the {spec.workers} workers; all pods have the same "
            "number"
        )
    run_dir = spec.run_dir or f"{RUNS}/{settings.name}"
    if not posixpath.normpath(run_dir).startswith(f"{RUNS}/"):
        raise UsageError(f"--run-dir {run_dir}: must be in {RUNS}, the volume of the pods")
    spec = replace(spec, run_dir=run_dir)
    pod, job = template(spec, settings), _job if settings.kind == "job" else _job_set
    for patch in patches:
        _check_patch(patch, settings)
        pod = merge(pod, {} if "kind" in patch else patch)
    whole = job(spec, settings, pod)
    for patch in patches:
        whole = merge(whole, patch if "kind" in patch else {})
    objects = [
        *([] if settings.job else [_config_map(spec, settings)]),
        *([_service(settings)] if settings.kind == "job" else []),
        _network_policy(settings),
        whole,
    ]
    return Manifests(settings, run_dir, tuple(objects))


def _check_patch(patch: Object, settings: Settings) -> None:
    """Raise UsageError unless a patch is of this job, or of something that it has."""
    kind = "Job" if settings.kind == "job" else "JobSet"
    if patch.get("kind", kind) != kind:
        raise UsageError(f"--set patch: the job is a {kind}, not a {patch['kind']}")
    if "kind" not in patch and (unknown := sorted(patch.keys() - {"metadata", "spec"})):
        raise UsageError(
            f"--set patch: {unknown[0]}: a pod template has metadata and spec; to change the job "
            f"itself, write kind: {kind} as well"
        )


def documents(objects: tuple[Object, ...]) -> str:
    """Return objects as YAML."""
    try:
        import yaml
    except ImportError:
        raise UsageError("--on kubernetes: PyYAML is not installed; pip install pyyaml") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None  # a block
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return yaml.dump_all(
        objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=100, allow_unicode=True
    )


def _whole(version: str, kind: str, run_dir: str, settings: Settings, spec: Object) -> Object:
    """Return the job itself, which names its run directory."""
    found = _object(version, kind, settings, spec=spec)
    found["metadata"]["annotations"] = {RUN_DIR: run_dir}
    return found


def _object(
    version: str, kind: str, settings: Settings, suffix: str = "", **content: Any
) -> Object:
    """Return an object that is named after its job."""
    where = {"namespace": settings.namespace} if settings.namespace else {}
    metadata = {"name": f"{settings.name}{suffix}", **where, "labels": settings.labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _config_map(spec: JobSpec, settings: Settings) -> Object:
    if len(spec.source.encode()) > _MAX_SOURCE:
        raise UsageError(
            f"{spec.job_file}: too long to be sent; put it into the image or on the volume, and "
            "specify --set job=PATH"
        )
    data = {posixpath.basename(spec.job_file): spec.source}
    return _object("v1", "ConfigMap", settings, "-job", data=data)


def _service(settings: Settings) -> Object:
    """Return the object that names the pods before they are ready; they meet at the first one."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": settings.labels}
    return _object("v1", "Service", settings, spec=spec)


def _network_policy(settings: Settings) -> Object:
    """Return the object that lets the pods connect to each other and to the name server alone."""
    peers = {"podSelector": {"matchLabels": settings.labels}}
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    closed: list[Object] = [{"to": [peers]}, {"ports": names}]
    spec = {
        "podSelector": peers["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [peers]}],
        "egress": closed if settings.egress == "job" else [{}],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", settings, spec=spec)


def _job(spec: JobSpec, settings: Settings, pod: Object) -> Object:
    """Return an indexed Job: each pod is restarted by itself, and the pods meet again."""
    rules = [_disrupted("Ignore"), _exited("FailJob", _USER_ERRORS), _exited("Ignore", _TERMINATED)]
    content = {
        **_indexed(spec),
        "backoffLimitPerIndex": settings.retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "ttlSecondsAfterFinished": settings.ttl,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }
    return _whole("batch/v1", "Job", spec.run_dir, settings, content)


def _job_set(spec: JobSpec, settings: Settings, pod: Object) -> Object:
    """Return a JobSet of one Job: when a pod is lost, all pods are restarted together."""
    lost_node = {
        "name": "lostNode",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [
            "has condition DisruptionTarget ",
            *(f"failed with exit code {status} " for status in _TERMINATED),
        ],
    }
    user_error = {
        "name": "userError",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    rules = [_disrupted("FailJob"), _exited("FailJob", [*_USER_ERRORS, *_TERMINATED])]
    job = {
        **_indexed(spec),
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }
    content = {
        "ttlSecondsAfterFinished": settings.ttl,
        "network": {"enableDNSHostnames": True, "subdomain": settings.name},
        "failurePolicy": {
            "maxRestarts": settings.retries,
            "restartStrategy": "BlockingRecreate",
            "rules": [lost_node, user_error],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }
    return _whole("jobset.x-k8s.io/v1alpha2", "JobSet", spec.run_dir, settings, content)


def _indexed(spec: JobSpec) -> Object:
    """Return the fields of a Job that is done when its first pod is, which runs the coordinator."""
    return {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }


def _disrupted(action: str) -> Object:
    condition = {"type": "DisruptionTarget", "status": "True"}
    return {"action": action, "onPodConditions": [condition]}


def _exited(action: str, statuses: list[int]) -> Object:
    return {"action": action, "onExitCodes": {"operator": "In", "values": statuses}}
