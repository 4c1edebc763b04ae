"""Kubernetes: a pod a node, in an indexed Job or a JobSet, which kubectl submits and ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import click

from launcher.engines.engine import Cluster, run_client
from launcher.engines.manifests import RUN_DIR, Manifests, documents, render
from launcher.engines.pod import LABEL, RUNS, Object, Settings
from launcher.spec import JobSpec
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.record.rundir import stamp
from pipeworker.wire.keys import new_token

_DRY = ("--dry-run=server", "-o", "name")
_SPARE = 1.5
"""Times the planned memory: allocators, the network's buffers, and data that is read ahead."""
_OTHERS = 2 << 30
"""The bytes of torchrun's agent, the coordinator, and the processes that read data or write."""
_PLAN_SECONDS = 300.0
_OF_PLAN = frozenset(
    {
        *("--microbatches", "--schedule", "--virtual-stages", "--recompute", "--precision"),
        *("--balance", "--replicas", "--shard-optimizer", "--deferred-batch-norm", "--memory"),
    }
)


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """A job of the cluster.

    Attributes:
        kind: ``job`` or ``jobset``.
        namespace: empty for the one that kubectl is set to.
    """

    kind: str
    name: str
    namespace: str
    run_dir: str

    def follow(self) -> int:
        """Show the commands by which the user follows and ends the job; it runs without us."""
        where = f" --namespace {self.namespace}" if self.namespace else ""
        selector = f"--selector app.kubernetes.io/instance={self.name}"
        click.echo(
            f"{self.kind} {self.name} is submitted; its run directory is {self.run_dir}\n"
            f"  kubectl get pods{where} {selector}\n"
            f"  kubectl logs{where} --follow {selector}\n"
            f"  kubectl delete {self.kind}{where} {self.name}"
        )
        return 0

    def cancel(self) -> str:
        """End the job, which saves a checkpoint; the cluster removes what it owns."""
        gone = ("--ignore-not-found", "--wait=false")
        _kubectl(self.namespace, "delete", self.kind, self.name, *gone)
        return (
            f"{self.kind} {self.name} in namespace {self.namespace} is deleted; its pods save a "
            f"checkpoint in {self.run_dir}"
        )


class Kubernetes(Cluster):
    """The cluster that kubectl is set to."""

    shares_files: ClassVar[bool] = False

    def new_run_dir(self, spec: JobSpec) -> str:
        """Return a path on the volume: restarted pods find it, and no other job has it."""
        return f"{RUNS}/{spec.name}-{stamp()}"

    def render(self, spec: JobSpec) -> str:
        return _manifests(spec).text

    def submit(self, spec: JobSpec) -> KubernetesJob:
        """Make the objects of a job, and a token for it.

        The cluster validates them all, with its own policies, before it makes the first one. The
        job owns the others: they are removed with it.
        """
        manifests = _manifests(spec)
        settings, token = manifests.settings, new_token()
        kind, name, namespace = settings.kind, settings.name, settings.namespace
        if _kubectl(namespace, "get", kind, name, "--ignore-not-found", "-o", "name").strip():
            raise UsageError(
                f"--set name={name}: {kind} {name} exists already; specify another name, or remove "
                f"it with kubectl delete {kind} {name}"
            )
        everything = documents((manifests.secret(token), *manifests.objects))
        _kubectl(namespace, "apply", *_DRY, "-f", "-", text=everything)
        made = _kubectl(
            namespace, "create", "-o", "json", "-f", "-", text=documents((manifests.job,))
        )
        job = KubernetesJob(kind, name, namespace, manifests.run_dir)
        try:
            owned = documents(manifests.owned(token, json.loads(made)))
            _kubectl(namespace, "apply", "-f", "-", text=owned)
        except PipeworkerError:
            job.cancel()
            raise
        return job


def find(run: str) -> KubernetesJob | None:
    """Return the job that has a run directory, or this name, in the namespace of kubectl.

    Raises:
        PipeworkerError: the cluster does not answer.
    """
    for kind in ("job", "jobset"):
        try:
            found = _kubectl("", "get", kind, "--selector", "=".join(LABEL), "-o", "json")
        except PipeworkerError:
            if kind == "jobset":  # a cluster need not have them
                continue
            raise
        for one in json.loads(found)["items"]:
            metadata: dict[str, Any] = one["metadata"]
            directory = metadata.get("annotations", {}).get(RUN_DIR, "")
            if run in (directory, metadata["name"]):
                return KubernetesJob(kind, metadata["name"], metadata["namespace"], directory)
    return None


def _manifests(spec: JobSpec) -> Manifests:
    patches = [_read_patch(Path(path)) for path in Settings.of(spec).patch.splitlines()]
    render(spec, patches)  # finds mistakes before the plan, which takes seconds
    return render(_limited(spec), patches)


def _read_patch(path: Path) -> Object:
    """Return a file's patch."""
    try:
        import yaml
    except ImportError:
        raise UsageError("--set patch: PyYAML is not installed; pip install pyyaml") from None
    try:
        patch = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--set patch={path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--set patch={path}: not one document of YAML: {reason}") from None
    if not isinstance(patch, dict):
        raise UsageError(f"--set patch={path}: must be a part of a pod template, as spec: …")
    return patch


def _limited(spec: JobSpec) -> JobSpec:
    """Return the job with a limit of memory, which the policies of many clusters demand."""
    settings = Settings.of(spec)
    if settings.memory:
        return spec
    try:
        memory = _planned_memory(spec, settings)
    except PipeworkerError as error:
        click.echo(
            f"warning: the memory of the pods is not limited ({error}); use --set memory=SIZE",
            err=True,
        )
        return spec
    return replace(spec, settings={**spec.settings, "memory": memory})


def _planned_memory(spec: JobSpec, settings: Settings) -> str:
    """Return the memory of a pod, in whole Gi: what its workers need as planned, with a reserve."""
    if settings.job:
        raise UsageError("its job file is in the pods, and cannot be planned here")
    words = ["--stages", str(spec.stages), "--no-profile", "--json"]
    for option, value in pairwise((*spec.options, "")):
        if option in _OF_PLAN:
            words += [option] if value.startswith("--") or not value else [option, value]
    line = [sys.executable, "-m", "pipeworker", "plan", *words, spec.job_file]
    line += ["--", *spec.arguments] if spec.arguments else []
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=_PLAN_SECONDS, cwd=Path(spec.folder)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PipeworkerError(f"its plan failed: {error}") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0].removeprefix("error: ")
        raise PipeworkerError(f"its plan failed: {reason}")
    needed = max(int(stage["memory_bytes"]) for stage in json.loads(done.stdout)["stages"])
    pod = int(_SPARE * needed * spec.workers_per_node) + _OTHERS
    return f"{-(-pod // 2**30)}Gi"


def _kubectl(namespace: str, *words: str, text: str = "") -> str:
    where = ("--namespace", namespace) if namespace else ()
    line = ("kubectl", *words, *where)
    try:
        return run_client(line, text, label=f"kubectl {words[0]}", cluster="the cluster")
    except OSError as error:
        raise UsageError(
            f"--on kubernetes: cannot run kubectl: {error.strerror}; install it and set it to a "
            "cluster"
        ) from None
