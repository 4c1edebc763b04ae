"""A job of which a test holds all the threads: its token, its lines, its control connections."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from pipeworker.job.options import Options
from pipeworker.session.processes import coordinator, fork_server
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import Bound, Configuration, Fork, Verdict, WorkerExited
from pipeworker.wire.messages.step import StepResult
from support.memory import resident
from support.proxy import Proxy

GENERATION = 1


class OwnJob:
    """A job started as the local launcher does, with a token known here.

    Args:
        descriptors: what the coordinator may have.
        bound: called with the endpoint before there are workers.
        proxied: workers reach the coordinator through a proxy.
    """

    def __init__(
        self,
        options: Options,
        run_dir: Path,
        descriptors: int | None = None,
        bound: Callable[[str], object] = lambda endpoint: None,
        *,
        proxied: bool = False,
    ) -> None:
        self._bound = bound
        self.token = new_token()
        self.proxied = proxied
        self.proxy: Proxy | None = None
        self.run_dir = run_dir
        self.endpoint = ""
        self.steps = 0
        self.verdict: Verdict | None = None
        self.codes: list[int] = []
        (run_dir / "logs").mkdir(parents=True)
        self._ranks = options.stages
        self.forks = fork_server()
        self.coordinator = coordinator()
        if descriptors is not None:
            limits = (descriptors, descriptors)
            resource.prlimit(self.coordinator.pid, resource.RLIMIT_NOFILE, limits)
        self.coordinator.say(
            Configuration(options.to_json(), str(run_dir), self.token, "127.0.0.1", GENERATION)
        )
        hears = (self._hear_coordinator, self._hear_forks)
        self.threads = [threading.Thread(target=hear) for hear in hears]
        for thread in self.threads:
            thread.start()

    def _hear_coordinator(self) -> None:
        more = True
        while more:
            events, more = self.coordinator.hear()
            for event in events:
                match event:
                    case Bound():
                        self.endpoint = endpoint = event.endpoint
                        self._bound(event.endpoint)
                        if self.proxied:
                            url = urlsplit(endpoint)
                            self.proxy = Proxy((url.hostname or "", url.port or 0))
                            endpoint = f"tcp://127.0.0.1:{self.proxy.address[1]}"
                        for rank in range(self._ranks):
                            fork = Fork(rank, GENERATION, endpoint, self.token, rank)
                            self.forks.say(fork)
                    case StepResult():
                        self.steps = event.step
                    case Verdict():
                        self.verdict = event

    def _hear_forks(self) -> None:
        more = True
        while more:
            events, more = self.forks.hear()
            for event in events:
                if isinstance(event, WorkerExited):
                    self.coordinator.say(event)

    @property
    def log(self) -> str:
        return (self.run_dir / "logs" / "coordinator.log").read_text()

    def resident(self) -> int:
        """Bytes of memory the coordinator holds."""
        return resident(self.coordinator.pid)

    def close(self) -> None:
        for process in (self.forks, self.coordinator):
            process.hang_up()
        for thread in self.threads:
            thread.join(10)
        self.codes = [process.finish(5.0) for process in (self.forks, self.coordinator)]
        if self.proxy is not None:
            self.proxy.close()
