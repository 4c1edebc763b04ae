"""Who starts a job: what was said on the command line, as the spec of a job elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from launcher.spec import JobSpec, job_name
from pipeworker.errors import UsageError

ELSEWHERE = ("kubernetes",)
"""What ``--on`` may say."""
_OURS = frozenset({"on", "nodes", "settings", "dry_run", "stages", "run_dir", "hosts"})
"""Options that are no rank's."""


def words(context: click.Context) -> tuple[str, ...]:
    """The options that were said on the command line and are for the ranks, as words again."""
    found: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        said = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not isinstance(parameter, click.Option) or name in _OURS or not said:
            continue
        value, option = context.params[name], parameter.opts[-1]
        if parameter.is_flag:
            found.append(option if value else parameter.secondary_opts[-1])
            continue
        for one in value if parameter.multiple else (value,):
            found += (option, str(one))
    return tuple(found)


def settings(said: Sequence[str]) -> dict[str, str]:
    """What ``--set NAME=VALUE`` says.

    Raises:
        UsageError: it has no ``=``.
    """
    found = {}
    for text in said:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"--set {text}: must be NAME=VALUE")
        found[name] = value
    return found


def spec_of(
    job_file: Path,
    workers: int,
    nodes: int,
    said: Mapping[str, str],
    options: tuple[str, ...],
    arguments: tuple[str, ...],
    run_dir: str,
) -> JobSpec:
    """A job that runs elsewhere."""
    return JobSpec(
        name=job_name(job_file.stem),
        job_file=str(job_file),
        workers=workers,
        words=options,
        arguments=arguments,
        folder=str(Path.cwd()),
        run_dir=run_dir,
        nodes=nodes,
        settings=said,
    )


def on_kubernetes(spec: JobSpec, *, dry_run: bool) -> str:
    """Submit a job to the cluster that kubectl is set to; returns what to show.

    Args:
        dry_run: only show what it would be asked for.

    Raises:
        PipeworkerError: the job or the cluster is not as it must be.
    """
    from launcher.kubectl import Kubectl
    from launcher.kubernetes import render
    from launcher.pod import RUNS

    if not spec.run_dir:  # pods that begin anew must find it, other jobs must not
        stamp = time.strftime("%Y%m%d-%H%M%S")
        spec = replace(spec, run_dir=f"{RUNS}/{spec.name}-{stamp}")
    try:
        source = "" if spec.settings.get("job") else Path(spec.job_file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{spec.job_file} is no text: {error}") from None
    manifests = render(spec, source)
    if dry_run:
        return manifests.text().rstrip("\n")
    Kubectl(manifests).submit()
    where = f" --namespace {manifests.namespace}" if manifests.namespace else ""
    label = f"app.kubernetes.io/instance={manifests.name}"
    return (
        f"{manifests.kind} {manifests.name} is submitted; its run directory is {spec.run_dir}\n"
        f"  kubectl get pods{where} --selector {label}\n"
        f"  kubectl logs{where} --follow --selector {label}\n"
        f"  kubectl delete {manifests.kind}{where} {manifests.name}"
    )
