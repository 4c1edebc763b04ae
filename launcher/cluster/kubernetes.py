"""A job as Kubernetes takes it: a pod a node, in an indexed Job or a JobSet. Pure.

A pod runs ``pipeworker node``, whose exit status says whose fault an end was. 1 and 2 are the
user's: the job has failed. 75 is a loss: all pods begin anew, and the run goes on from its last
checkpoint. A lost node, or a pod that was told to end, does not count among the attempts.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Any

from launcher.cluster.pod import SECRET, Settings, labels, template
from launcher.spec import JobSpec
from pipeworker.errors import UsageError

_OF_USER = [1, 2]
_ENDED = [130, 143]
_MOST_TEXT = 1_000_000  # bytes of a ConfigMap, which has 1 MiB
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")

_Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifests:
    """The objects of a job, in the order in which they are made; the last one is the job.

    The token is not among them: ``secret`` makes it when they are applied.
    """

    name: str
    namespace: str
    kind: str
    objects: tuple[_Object, ...]

    @property
    def secret_name(self) -> str:
        return f"{self.name}-token"

    def secret(self, token: str) -> _Object:
        """The token, for the pods of this job alone."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _metadata(self.name, self.namespace, self.secret_name),
            "type": "Opaque",
            "stringData": {SECRET: token},
        }

    def text(self) -> str:
        """YAML, as ``kubectl apply -f`` takes it."""
        where = f" --namespace {self.namespace}" if self.namespace else ""
        return (
            f"# The token is a secret, made by hand or when the job is submitted:\n"
            f"#   kubectl create secret generic {self.secret_name}{where} \\\n"
            f'#     --from-literal {SECRET}="$(openssl rand -hex 32)"\n'
        ) + documents(self.objects)


def render(spec: JobSpec, source: str = "") -> Manifests:
    """What Kubernetes is asked for.

    Args:
        source: the text of the job file, which the pods are given; not needed where they have it
            (``--set job=PATH``).

    Raises:
        UsageError: a setting is wrong, or what is asked for cannot be had on Kubernetes.
    """
    settings = Settings.of(spec.settings)
    name = settings.name or spec.name
    if not _NAME.fullmatch(name):
        raise UsageError(f"--set name={name}: must be small letters, digits and -, at most 40")
    if spec.workers % spec.nodes:
        raise UsageError(
            f"{spec.workers} workers on --nodes {spec.nodes}: each pod has as many as the others"
        )
    pod = template(spec, settings, name)
    objects = [
        *([] if settings.job else [_config_map(spec, settings, name, source)]),
        *([_service(settings, name)] if settings.kind == "job" else []),
        _network_policy(settings, name),
        (_job if settings.kind == "job" else _job_set)(spec, settings, name, pod),
    ]
    return Manifests(name, settings.namespace, settings.kind, tuple(objects))


def documents(objects: tuple[_Object, ...]) -> str:
    """Objects as YAML.

    Raises:
        UsageError: there is no library for YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "--on kubernetes needs PyYAML: pip install 'pipeworker[kubernetes]'"
        ) from None

    class Dumper(yaml.SafeDumper):
        """Text of several lines as such; what is said twice is written twice."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def written(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, written)
    said = yaml.dump_all(
        objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=100, allow_unicode=True
    )
    assert isinstance(said, str)
    return said


def _metadata(name: str, namespace: str, own: str = "") -> _Object:
    where = {"namespace": namespace} if namespace else {}
    return {"name": own or name, **where, "labels": labels(name)}


def _config_map(spec: JobSpec, settings: Settings, name: str, source: str) -> _Object:
    if len(source.encode()) > _MOST_TEXT:
        raise UsageError(
            f"{spec.job_file} is too long to be sent: have it in the image or on the volume, and "
            "say --set job=PATH"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, settings.namespace, f"{name}-job"),
        "data": {posixpath.basename(spec.job_file): source},
    }


def _service(settings: Settings, name: str) -> _Object:
    """Names for the pods, before they are ready: the first one is where they meet."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, settings.namespace),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(name),
        },
    }


def _network_policy(settings: Settings, name: str) -> _Object:
    """The pods talk to each other, and ask for names."""
    peers = {"podSelector": {"matchLabels": labels(name)}}
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    closed: list[_Object] = [{"to": [peers]}, {"ports": names}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(name, settings.namespace),
        "spec": {
            "podSelector": peers["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [peers]}],
            "egress": closed if settings.egress == "job" else [{}],
        },
    }


def _job(spec: JobSpec, settings: Settings, name: str, pod: _Object) -> _Object:
    """An indexed Job; each pod begins anew for itself, and they meet again."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(name, settings.namespace),
        "spec": {
            **_indexed(spec),
            "backoffLimitPerIndex": settings.retries,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    _disrupted("Ignore"),
                    _exited("FailJob", _OF_USER),
                    _exited("Ignore", _ENDED),
                ]
            },
            "template": pod,
        },
    }


def _job_set(spec: JobSpec, settings: Settings, name: str, pod: _Object) -> _Object:
    """A JobSet of one Job: when a pod is lost, all of them are begun anew together."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, settings.namespace),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {
                "maxRestarts": settings.retries,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "lostNode",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "onJobFailureMessagePatterns": [
                            "has condition DisruptionTarget ",
                            *(f"failed with exit code {status} " for status in _ENDED),
                        ],
                    },
                    {
                        "name": "errorOfTheUser",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    },
                ],
            },
            "replicatedJobs": [
                {
                    "name": "node",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            **_indexed(spec),
                            "backoffLimit": 0,
                            "podFailurePolicy": {
                                "rules": [
                                    _disrupted("FailJob"),
                                    _exited("FailJob", [*_OF_USER, *_ENDED]),
                                ]
                            },
                            "template": pod,
                        }
                    },
                }
            ],
        },
    }


def _indexed(spec: JobSpec) -> _Object:
    """The first pod has the coordinator, so the job is done when it is."""
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
