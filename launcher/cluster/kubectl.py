"""Acts on Kubernetes, through kubectl: submits what was rendered, asks for it, ends it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from launcher.cluster.kubernetes import Manifests, documents
from launcher.spec import Condition
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.wire.keys import new_token

_SECONDS = 60.0
_OURS = "secret,configmap,service,networkpolicy"
"""What is made for a job, besides itself."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """A job on the cluster that kubectl is set to.

    Attributes:
        manifests: what was rendered for it.
        argv: how kubectl is called.
    """

    manifests: Manifests
    argv: tuple[str, ...] = ("kubectl",)

    def submit(self) -> None:
        """Have the job made, and a token for it.

        Raises:
            UsageError: there is such a job already, or no kubectl.
            PipeworkerError: the cluster refuses.
        """
        name = self.manifests.name
        if self._found():
            raise UsageError(
                f"{self.manifests.kind} {name} exists already: say --set name=NAME, or remove it "
                f"with kubectl delete {self.manifests.kind} {name}"
            )
        secret = self.manifests.secret(new_token())
        self._run("apply", "-f", "-", said=documents((secret, *self.manifests.objects)))

    def status(self) -> Condition:
        """How the job is now."""
        found = self._found()
        if not found:
            return Condition("absent")
        status = found.get("status", {})
        for condition in status.get("conditions", []):
            end = {"Complete": "done", "Completed": "done", "Failed": "failed"}
            if condition["type"] in end and condition["status"] == "True":
                why = condition.get("message") or condition.get("reason") or ""
                return Condition(end[condition["type"]], why)
        counts = [status, *status.get("replicatedJobsStatus", [])]
        active = any(count.get("active") for count in counts)
        return Condition("running" if active else "waiting")

    def logs(self, *, follow: bool = False) -> int:
        """Show what the first pod, which speaks for the job, says; returns kubectl's status."""
        index = "batch.kubernetes.io/job-completion-index=0"
        chosen = f"app.kubernetes.io/instance={self.manifests.name},{index}"
        words = ("logs", "--selector", chosen, "--tail", "-1", *(["--follow"] if follow else []))
        try:
            return subprocess.run([*self.argv, *words, *self._where], check=False).returncode
        except OSError as error:
            raise self._missing(error) from None

    def cancel(self) -> None:
        """End the job, which writes a checkpoint, and remove what was made for it."""
        kind, name = self.manifests.kind, self.manifests.name
        self._run("delete", kind, name, "--ignore-not-found", "--wait=false")
        chosen = f"app.kubernetes.io/instance={name}"
        self._run("delete", _OURS, "--selector", chosen, "--ignore-not-found", "--wait=false")

    def _found(self) -> dict[str, Any]:
        kind, name = self.manifests.kind, self.manifests.name
        said = self._run("get", kind, name, "--ignore-not-found", "-o", "json")
        if not said.strip():
            return {}
        found = json.loads(said)
        assert isinstance(found, dict)
        return found

    @property
    def _where(self) -> tuple[str, ...]:
        namespace = self.manifests.namespace
        return ("--namespace", namespace) if namespace else ()

    def _run(self, *words: str, said: str | None = None) -> str:
        """What kubectl answers; secrets go through its input, which nobody else sees."""
        try:
            ran = subprocess.run(
                [*self.argv, *words, *self._where],
                input=said or "",
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except OSError as error:
            raise self._missing(error) from None
        except subprocess.TimeoutExpired:
            raise PipeworkerError(
                f"kubectl {words[0]}: the cluster has not answered for {_SECONDS:g} s"
            ) from None
        if ran.returncode:
            why = ran.stderr.strip() or f"exit status {ran.returncode}"
            raise PipeworkerError(f"kubectl {words[0]}: {why}")
        return ran.stdout

    def _missing(self, error: OSError) -> UsageError:
        return UsageError(
            f"--on kubernetes needs {self.argv[0]}, set to a cluster: {error.strerror}"
        )
