"""The loggers that a job's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipeworker.job.options import Options
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir

_CLASSES = {"wandb": "Wandb", "mlflow": "MLflow", "metrics_port": "Prometheus"}
_MODULES = {"metrics_port": "prometheus"}
"""Modules beside this one that are not named like their option."""


def chosen(
    options: Options, run_dir: RunDir, fail: Callable[[str, BaseException], None]
) -> dict[str, Any]:
    """Return the loggers of a job by what messages call them.

    `fail` gets the name of one that cannot be made, and why; the job goes on without it.

    Raises:
        UsageError: ``run.json`` cannot be read.
    """
    found: dict[str, Any] = {}
    record = RunRecord.read(run_dir) if options.loggers else None
    for option in options.loggers:
        name = f"--{option.replace('_', '-')}"
        module = import_module(f"pipeworker.worker.loggers.{_MODULES.get(option, option)}")
        try:
            found[name] = getattr(module, _CLASSES[option])(getattr(options, option), record)
        except (Exception, SystemExit) as error:
            fail(name, error)
    return found
