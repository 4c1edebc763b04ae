"""An evaluation pass, and what it gave."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages.limits import check, check_names


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation pass after `step` gave: a row of evaluation.jsonl.

    The loss is averaged over samples, or Σsum / Σcount; `values` are the metrics, by `names`.
    """

    step: int
    loss: float
    names: tuple[str, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.names, "metrics")
        names, values = len(self.names), len(self.values)
        check(names == values, f"{names} names of metrics for {values} values")

    def row(self) -> dict[str, float]:
        """``loss`` and the metrics."""
        return {"loss": self.loss, **dict(zip(self.names, self.values, strict=True))}


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """A worker has run an evaluation pass to its end; `result` comes with the last stage alone."""

    rank: int
    step: int
    peak_memory: int
    result: Evaluation | None

    def __post_init__(self) -> None:
        check(self.peak_memory >= 0, f"{self.peak_memory} bytes of memory")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation pass gave this loss: a scheduler may look at it."""

    loss: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run an evaluation pass, or a prediction, after `step`."""

    step: int
