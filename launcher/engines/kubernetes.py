"""Kubernetes: a pod a node, in an indexed Job or a JobSet, which kubectl submits and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import click

from launcher.engines.engine import Cluster, run_client, stamp
from launcher.engines.manifests import Manifests, documents, render
from launcher.engines.pod import RUNS, Settings
from launcher.spec import JobSpec
from pipeworker.errors import UsageError
from pipeworker.wire.keys import new_token

_OWNED = "secret,configmap,service,networkpolicy"
"""The kinds of the objects that are made for a job, besides the job itself."""


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    manifests: Manifests

    def follow(self) -> int:
        """Show the commands by which the user follows and ends the job; it runs without us."""
        settings = self.manifests.settings
        kind, name = settings.kind, settings.name
        where = f" --namespace {settings.namespace}" if settings.namespace else ""
        selector = f"--selector {self._label}"
        click.echo(
            f"{kind} {name} is submitted; its run directory is {self.manifests.run_dir}\n"
            f"  kubectl get pods{where} {selector}\n"
            f"  kubectl logs{where} --follow {selector}\n"
            f"  kubectl delete {kind}{where} {name}"
        )
        return 0

    def cancel(self) -> None:
        """End the job, which saves a checkpoint, and remove what was made for it."""
        now = ("--ignore-not-found", "--wait=false")
        settings = self.manifests.settings
        _kubectl(settings, "delete", settings.kind, settings.name, *now)
        _kubectl(settings, "delete", _OWNED, "--selector", self._label, *now)

    @property
    def _label(self) -> str:
        return f"app.kubernetes.io/instance={self.manifests.settings.name}"


class Kubernetes(Cluster):
    """The cluster that kubectl is set to."""

    name = "kubernetes"
    shares_files: ClassVar[bool] = False

    def new_run_dir(self, spec: JobSpec) -> str:
        """Return a path on the volume: restarted pods find it, and no other job has it."""
        return f"{RUNS}/{spec.name}-{stamp()}"

    def render(self, spec: JobSpec) -> str:
        return render(spec).text

    def submit(self, spec: JobSpec) -> KubernetesJob:
        """Make the objects of a job, and a token for it.

        Raises:
            UsageError: the job exists already, or kubectl is not installed.
            PipeworkerError: the cluster rejects it.
        """
        manifests = render(spec)
        settings = manifests.settings
        kind, name = settings.kind, settings.name
        if _kubectl(settings, "get", kind, name, "--ignore-not-found", "-o", "name").strip():
            raise UsageError(
                f"--set name={name}: {kind} {name} exists already; specify another name, or remove "
                f"it with kubectl delete {kind} {name}"
            )
        objects = (manifests.secret(new_token()), *manifests.objects)
        _kubectl(settings, "apply", "-f", "-", text=documents(objects))
        return KubernetesJob(manifests)


def _kubectl(settings: Settings, *words: str, text: str = "") -> str:
    namespace = ("--namespace", settings.namespace) if settings.namespace else ()
    line = ("kubectl", *words, *namespace)
    try:
        return run_client(line, text, label=f"kubectl {words[0]}", cluster="the cluster")
    except OSError as error:
        raise UsageError(
            f"--on kubernetes: cannot run kubectl: {error.strerror}; install it and set it to a "
            "cluster"
        ) from None
