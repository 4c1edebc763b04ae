"""``--mlflow``: the rows of a run, in an experiment of MLflow."""

from __future__ import annotations

from pathlib import Path

from pipeworker.record.metrics.rows import Row
from pipeworker.record.run_record import RunRecord
from pipeworker.worker.loggers.identity import EVALUATION, identity, status

_TAG = "pipeworker.run"
_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}
_CHECKPOINT = "pipeworker.checkpoint"


class MLflow:
    """One run of MLflow for a run directory; a run that is resumed continues it.

    MLflow finds its server as usual, by ``MLFLOW_TRACKING_URI``. Checkpoints stay where they are: a
    tag has the folder of the last one.

    Raises:
        Exception: whatever MLflow raises, as for a server that does not answer.
    """

    def __init__(self, experiment: str, record: RunRecord) -> None:
        import mlflow

        self._mlflow, self._record, own = mlflow, record, identity(record)
        found = mlflow.set_experiment(experiment)
        earlier = mlflow.search_runs(
            [found.experiment_id],
            filter_string=f"tags.`{_TAG}` = '{own}'",
            max_results=1,
            output_format="list",
        )
        if earlier:
            mlflow.start_run(run_id=earlier[0].info.run_id)
        else:
            mlflow.start_run(run_name=record.run_dir.path.name, tags={_TAG: own})
            mlflow.log_params(record.options)

    def on_step(self, row: Row) -> None:
        self._log("", row)

    def on_evaluation(self, row: Row) -> None:
        self._log(EVALUATION, row)

    def on_checkpoint(self, path: Path) -> None:
        self._mlflow.set_tag(_CHECKPOINT, str(path))

    def _log(self, prefix: str, row: Row) -> None:
        found = {
            f"{prefix}{name}": float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, (int, float))
        }
        self._mlflow.log_metrics(found, step=row["step"])

    def close(self) -> None:
        """End the run of MLflow, as finished, killed or failed."""
        self._mlflow.end_run(_STATUS.get(status(self._record), "FAILED"))
