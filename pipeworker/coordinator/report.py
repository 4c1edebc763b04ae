"""How a failure reads to the user, and what the coordinator tells the process that started it.

The coordinator's standard input and output are pipes to its starter: JSON objects, one a line.
In: the :func:`configuration` first, then ``exited`` and ``interrupt``. Out: ``bound``,
``planned``, ``step``, ``warning`` and at last ``ended``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeworker.coordinator.effects import Ended, Planned
from pipeworker.job.options import Options
from pipeworker.wire.messages import Cause, Failure, Phase


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the coordinator is started with. `token` travels in the pipe and nowhere else.

    `starter` is the rank of the worker that is the coordinator's parent, -1 for a launcher.
    """

    options: Options
    run_dir: str
    token: str
    host: str
    generation: int = 1
    starter: int = -1

    def to_json(self) -> dict[str, Any]:
        return {
            "options": self.options.to_json(),
            "run_dir": self.run_dir,
            "token": self.token,
            "host": self.host,
            "generation": self.generation,
            "starter": self.starter,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Configuration:
        return Configuration(**{**value, "options": Options.from_json(value["options"])})


def place(failure: Failure) -> str:
    """``stage 1, layer 3 (Block), micro-batch 2, step 7``: what applies of it."""
    position = failure.position
    parts = []
    if failure.rank >= 0:
        parts.append(f"stage {failure.rank}")
    if position.layer >= 0:
        shown = f" ({failure.layer_class})" if failure.layer_class else ""
        parts.append(f"layer {position.layer}{shown}")
    if position.microbatch >= 0:
        parts.append(f"micro-batch {position.microbatch}")
    if position.step >= 0:
        parts.append(f"step {position.step}")
    return ", ".join(parts)


def describe(failure: Failure) -> str:
    """The whole message for the user: what, where, and the user's own traceback."""
    lines = [failure.message]
    where = place(failure)
    if where and failure.cause is not Cause.USAGE:
        doing = (
            ""
            if failure.position.phase is Phase.STARTING
            else f"in {failure.position.phase.label}: "
        )
        lines.append(f"  {doing}{where}")
    if failure.traceback:
        lines.append("\n" + failure.traceback.rstrip())
    return "\n".join(lines)


def planned_json(planned: Planned, options: Options) -> dict[str, Any]:
    """plan.json: what each stage was given, and what the schedule's proof says."""
    proof = planned.proof
    return {
        "job_file": options.job_file,
        "schedule": planned.schedule.name,
        "recompute": options.recompute,
        "microbatches": options.microbatches,
        "bubble": proof.bubble,
        "balance": [stop - first for first, stop in (s.layers for s in planned.stages)],
        "stages": [
            {
                "stage": index,
                "layers": list(range(*stage.layers)),
                "classes": list(stage.classes),
                "parameters": stage.parameters,
                "device": stage.device,
                "host": stage.host,
                "pid": stage.pid,
                "live_activations": proof.live_activations[index],
                "live_inputs": proof.live_inputs[index],
            }
            for index, stage in enumerate(planned.stages)
        ],
        "actions": str(planned.schedule).splitlines(),
    }


def ended_json(ended: Ended, seconds: float) -> dict[str, Any]:
    """The verdict."""
    return {
        "status": ended.status.value,
        "exit_status": ended.exit_status,
        "steps": ended.steps,
        "seconds": seconds,
        "peak_memory_bytes": list(ended.peak_memory),
        "bubble": ended.bubble,
        "error": describe(ended.failure) if ended.failure else None,
    }
