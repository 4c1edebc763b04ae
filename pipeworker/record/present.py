"""What the workers of a running job do at present: a file that its coordinator writes if asked."""

from __future__ import annotations

import msgspec

from pipeworker.record.files.bounded_file import read_json
from pipeworker.record.rundir import RunDir


class PresentWorker(msgspec.Struct):
    """A worker, by its last heartbeat.

    Attributes:
        step, microbatch, layer: its position; -1 where it has none.
        kind: the class of the layer.
        waits: it waits for another worker or for the coordinator.
        memory_bytes: of its device, or of its process.
        held: micro-batches that wait on it for their backward, once for each stage.
    """

    worker: int
    replica: int
    host: str
    stages: list[int]
    phase: str
    step: int
    microbatch: int
    layer: int
    waits: bool
    memory_bytes: int
    held: int
    silent_seconds: float
    kind: str = msgspec.field(name="class", default="")


class Present(msgspec.Struct):
    """A job at a `time`, in seconds since 1970; `restarts`: its losses of workers."""

    time: float
    generation: int
    restarts: int
    doing: str
    workers: list[PresentWorker]


def read(run_dir: RunDir) -> Present:
    """Return what the workers do; :attr:`Request.WATCH` asks the job to write it.

    Raises:
        FileNotFoundError: the job has not written it yet.
        UnreadableFile: the file is not what a job writes.
    """
    found = read_json(run_dir.now, Present, "it is not of a job")
    return msgspec.convert(found, Present)
