"""A worker's main thread: does what the coordinator says, and says what went wrong."""

from __future__ import annotations

from collections.abc import Callable

from pipeworker.host import streams
from pipeworker.wire.messages.advance import Advance, Finish
from pipeworker.wire.messages.failure import Abort, Failed, Failure
from pipeworker.worker.console import detach
from pipeworker.worker.control import Control, Leave, leave_process
from pipeworker.worker.settings import Settings
from pipeworker.worker.worker import Worker


def _nobody(failure: Failure) -> None:
    """Who else is told of a failure, where there is nobody."""


def run(
    settings: Settings,
    leave: Leave = leave_process,
    tell: Callable[[Failure], None] = _nobody,
) -> int:
    """Be one worker from Hello to the end; returns the exit status.

    Args:
        leave: as :class:`Control` takes it.
        tell: is told of a failure of this worker's before the coordinator is.
    """
    detach()
    control = Control(
        endpoint=settings.endpoint,
        token=settings.token,
        rank=settings.rank,
        generation=settings.generation,
        tracker=settings.tracker,
        leave=leave,
    )
    control.start()
    worker = Worker(settings, control)
    try:
        control.send(worker.hello())
        while not over(message := control.receive()):
            answer = worker.handle(message)
            if answer is not None:
                control.send(answer)
    except BaseException as error:
        failure = worker.explain(error)
        tell(failure)
        control.send(Failed(settings.rank, failure))
        # The coordinator knows the first cause; leaving before it says so would make neighbours
        # report a lost connection first. The control thread ends the process.
        while True:
            control.receive()
    control.close()
    streams.flush()
    return 0


def over(message: object) -> bool:
    """Whether the coordinator says that there is no more to do."""
    if isinstance(message, Advance):
        return isinstance(message.next, Finish)
    return isinstance(message, Abort)
