"""Makes the loggers that a job's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipeworker.job.options import Options
from pipeworker.record.run_record import RunRecord

_CLASSES = {
    "wandb": "wandb.Wandb",
    "mlflow": "mlflow.MLflow",
    "metrics_port": "prometheus.Prometheus",
}
"""By option, a module beside this one and its class."""


def make_loggers(
    options: Options, record: RunRecord, fail: Callable[[str, BaseException], None]
) -> list[tuple[str, Any]]:
    """Return the loggers of a job, each with the option that asks for it.

    `fail` gets the option of a logger that cannot be made, and the error; the job continues
    without that logger.
    """
    found: list[tuple[str, Any]] = []
    for option in options.loggers:
        name = f"--{option.replace('_', '-')}"
        module, _, kind = _CLASSES[option].partition(".")
        try:
            made = getattr(import_module(f"pipeworker.worker.loggers.{module}"), kind)
            found.append((name, made(getattr(options, option), record)))
        except (Exception, SystemExit) as error:
            fail(name, error)
    return found
