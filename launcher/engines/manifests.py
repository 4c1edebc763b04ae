"""The Kubernetes objects of a job: a pod a node, in an indexed Job or a JobSet. Pure.

A pod runs ``pipeworker node``. After its exit statuses 1 and 2, errors of the user, the job has
failed. After 75, the loss of a process, all pods are restarted, and the run resumes from its last
checkpoint. A lost node, or a pod that was asked to end, does not count as an attempt.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Any

from launcher.engines.pod import SECRET, Settings, labels, run_dir_of, template
from launcher.spec import JobSpec
from pipeworker.errors import UsageError

_USER_ERRORS = [1, 2]
_TERMINATED = [130, 143]
_MAX_SOURCE = 1_000_000  # bytes in a ConfigMap, which holds 1 MiB
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")

_Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifests:
    """The objects of a job.

    Attributes:
        namespace: empty for the one that kubectl is set to.
        kind: ``job`` or ``jobset``.
        run_dir: the run directory, on the volume of the pods.
        objects: in the order in which they are made; the last one is the job. The token is not
            among them: :meth:`secret` makes it when they are applied.
    """

    name: str
    namespace: str
    kind: str
    run_dir: str
    objects: tuple[_Object, ...]

    def secret(self, token: str) -> _Object:
        """Return the object that gives the token to the pods of this job."""
        content = {"type": "Opaque", "stringData": {SECRET: token}}
        return _object("v1", "Secret", self.name, self.namespace, "-token", **content)

    def text(self) -> str:
        """Return the objects as YAML, for ``kubectl apply -f``."""
        where = f" --namespace {self.namespace}" if self.namespace else ""
        return (
            f"# The token is a secret. pipeworker makes it when it submits the job; by hand:\n"
            f"#   kubectl create secret generic {self.name}-token{where} \\\n"
            f'#     --from-literal {SECRET}="$(openssl rand -hex 32)"\n'
        ) + documents(self.objects)


def render(spec: JobSpec) -> Manifests:
    """Return the objects of a job; with its file, unless the pods have that (``--set job=PATH``).

    Raises:
        UsageError: a setting is invalid, or Kubernetes cannot run the job so.
    """
    settings = Settings.of(spec.settings)
    name = settings.name or spec.name
    if not _NAME.fullmatch(name):
        raise UsageError(f"--set name={name}: must be lower-case letters, digits and -, at most 40")
    if spec.workers % spec.nodes:
        raise UsageError(
            f"--nodes {spec.nodes}: must divide the {spec.workers} workers; all pods have the same "
            "number"
        )
    pod = template(spec, settings, name)
    objects = [
        *([] if settings.job else [_config_map(spec, settings, name)]),
        *([_service(settings, name)] if settings.kind == "job" else []),
        _network_policy(settings, name),
        (_job if settings.kind == "job" else _job_set)(spec, settings, name, pod),
    ]
    run_dir = run_dir_of(spec, name)
    return Manifests(name, settings.namespace, settings.kind, run_dir, tuple(objects))


def documents(objects: tuple[_Object, ...]) -> str:
    """Return objects as YAML.

    Raises:
        UsageError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "--on kubernetes: PyYAML is not installed; pip install 'pipeworker[kubernetes]'"
        ) from None

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


def _object(
    version: str, kind: str, job: str, namespace: str, suffix: str = "", **content: Any
) -> _Object:
    """Return an object that is named after its job."""
    where = {"namespace": namespace} if namespace else {}
    metadata = {"name": f"{job}{suffix}", **where, "labels": labels(job)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _config_map(spec: JobSpec, settings: Settings, name: str) -> _Object:
    if len(spec.source.encode()) > _MAX_SOURCE:
        raise UsageError(
            f"{spec.job_file}: too long to be sent; put it into the image or on the volume, and "
            "specify --set job=PATH"
        )
    data = {posixpath.basename(spec.job_file): spec.source}
    return _object("v1", "ConfigMap", name, settings.namespace, "-job", data=data)


def _service(settings: Settings, name: str) -> _Object:
    """Return the object that names the pods before they are ready; they meet at the first one."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(name)}
    return _object("v1", "Service", name, settings.namespace, spec=spec)


def _network_policy(settings: Settings, name: str) -> _Object:
    """Return the object that lets the pods connect to each other and to the name server alone."""
    peers = {"podSelector": {"matchLabels": labels(name)}}
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    closed: list[_Object] = [{"to": [peers]}, {"ports": names}]
    spec = {
        "podSelector": peers["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [peers]}],
        "egress": closed if settings.egress == "job" else [{}],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, settings.namespace, spec=spec)


def _job(spec: JobSpec, settings: Settings, name: str, pod: _Object) -> _Object:
    """Return an indexed Job: each pod is restarted by itself, and the pods meet again."""
    rules = [
        _disrupted("Ignore"),
        _exited("FailJob", _USER_ERRORS),
        _exited("Ignore", _TERMINATED),
    ]
    content = {
        **_indexed(spec),
        "backoffLimitPerIndex": settings.retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }
    return _object("batch/v1", "Job", name, settings.namespace, spec=content)


def _job_set(spec: JobSpec, settings: Settings, name: str, pod: _Object) -> _Object:
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
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": settings.retries,
            "restartStrategy": "BlockingRecreate",
            "rules": [lost_node, user_error],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, settings.namespace, spec=content)


def _indexed(spec: JobSpec) -> _Object:
    """Return the fields of a Job that is done when its first pod is, which runs the coordinator."""
    return {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }


def _disrupted(action: str) -> _Object:
    condition = {"type": "DisruptionTarget", "status": "True"}
    return {"action": action, "onPodConditions": [condition]}


def _exited(action: str, statuses: list[int]) -> _Object:
    return {"action": action, "onExitCodes": {"operator": "In", "values": statuses}}
