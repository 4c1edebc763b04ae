"""``metrics()`` on the first samples of training: a mistake shows before any step is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.facts.criterion import Criterion
from pipeworker.host import streams
from pipeworker.worker.blame import text
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.values import map_tensors
from pipeworker.worker.step.averages import Metrics, checked_figures


def check_figures(metrics: Metrics | None, best: str) -> Callable[[Any, Any], None]:
    """Return a check of what ``metrics`` returns, and of the figure that ``--best`` names.

    The check takes the output and the target of a micro-batch, nested tensors of ``[n, ...]``. It
    works on a copy of the first three samples, and changes neither tensors nor random streams. If
    ``metrics`` raises, only the worker's log says so: evaluation data may have another form.
    """

    def check(output: Any, target: Any) -> None:
        values: Mapping[str, Any] = {}
        if metrics is not None:
            try:
                with rng.preserve_generators(), torch.no_grad():
                    found = metrics(map_tensors(_first, output), map_tensors(_first, target))
            except PipeworkerError:
                raise
            except Exception as error:
                streams.note(
                    f"metrics(output, target) raised {text(error)} for the first samples of "
                    "training; it is called again in evaluations"
                )
                return
            values = checked_figures(found)
        name, figures = Criterion.parse(best).name, ["loss", *values]
        # The name may begin with that of an evaluation set.
        if not any(name == figure or name.endswith(f"/{figure}") for figure in figures):
            raise UsageError(
                f"--best {best}: no evaluation has such a figure; use one of {', '.join(figures)}, "
                "behind the name of its set where evaluation() returns a dict, as in "
                f"NAME/{figures[-1]}, and with max: before it if more is better"
            )

    return check


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of three samples: a metric of each sample is then no scalar, and no pair."""
    tensor = tensor.detach()
    return (tensor[:3] if tensor.dim() else tensor).clone()
