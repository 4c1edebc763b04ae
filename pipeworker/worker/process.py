"""The process of a worker: it introduces itself, and handles the coordinator's messages."""

from __future__ import annotations

from collections.abc import Callable

from pipeworker.facts.failure import Failure
from pipeworker.host import streams
from pipeworker.wire.messages.directions import Advance, is_last
from pipeworker.wire.messages.presence import Failed
from pipeworker.worker.console import detach_terminal
from pipeworker.worker.control import Control, Exit, exit_process
from pipeworker.worker.settings import Settings
from pipeworker.worker.stray_children import end_stray_child
from pipeworker.worker.worker import Worker


def run(
    settings: Settings,
    exit_process: Exit = exit_process,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> int:
    """Run one worker from its Hello to the end; return the exit status.

    `on_failure` is called with a failure of this worker before the coordinator receives it.
    """
    detach_terminal()
    streams.log_pending = settings.to_log
    control = Control(settings, exit_process)
    control.start()
    worker = Worker(settings, control)
    try:
        control.send(worker.hello())
        while not is_last(message := control.receive()):
            answer = worker.handle(message)
            end_stray_child()
            if answer is not None:
                control.send(answer)
            worker.record()
    except BaseException as error:
        end_stray_child()
        failure = worker.explain(error)
        on_failure(failure)
        control.send(Failed(settings.rank, failure))
        # The coordinator decides about the first cause. If this worker exited before that, its
        # neighbours would report a lost connection first. The control thread ends the process.
        while True:
            control.receive()
    worker.end_profile()
    if isinstance(message, Advance):  # else the job may go on with other workers
        worker.loaded.reader.close()
    control.close()
    streams.flush()
    return 0
