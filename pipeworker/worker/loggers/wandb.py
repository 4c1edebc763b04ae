"""``--wandb``: the rows of a run, in a project of Weights & Biases."""

from __future__ import annotations

from pipeworker.record.metrics.rows import Row
from pipeworker.record.run_record import RunRecord
from pipeworker.worker.loggers.identity import EVALUATION, identity, status


class Wandb:
    """One run of wandb for a run directory; a run that is resumed continues it.

    What is not sent, as in wandb's mode ``offline``, is kept in the run directory.

    Raises:
        Exception: whatever wandb raises, as without a login.
    """

    def __init__(self, project: str, record: RunRecord) -> None:
        import wandb

        self._record = record
        self._run = wandb.init(
            project=project,
            name=record.run_dir.path.name,
            id=identity(record),
            resume="allow",
            dir=str(record.run_dir.path),
            config=record.options,
        )

    def on_step(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def on_evaluation(self, row: Row) -> None:
        found = {f"{EVALUATION}{name}": value for name, value in row.items() if name != "step"}
        self._run.log(found, step=row["step"])

    def close(self) -> None:
        """End the run of wandb, as failed if the job failed, when everything is sent."""
        self._run.finish(exit_code=int(status(self._record) not in ("done", "interrupted")))
