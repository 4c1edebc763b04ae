"""A job whose processes a test controls: it knows the token and forwards the lines."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from pipeworker.facts.step import StepResult
from pipeworker.host.line_process import start_agent, start_coordinator
from pipeworker.job.options import Options
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import Bound, Configuration, Fork, Verdict, WorkerExited
from support.processes.memory import resident
from support.processes.proxy import Proxy

GENERATION = 1


class ManualJob:
    """A job started as the local launcher starts it, with a token that the test knows.

    Args:
        options: of the job.
        run_dir: is created.
        descriptors: the coordinator's limit on open files.
        on_bound: called with the endpoint before workers are started.
        proxied: workers reach the coordinator through a proxy.
    """

    def __init__(
        self,
        options: Options,
        run_dir: Path,
        descriptors: int | None = None,
        on_bound: Callable[[str], object] = lambda endpoint: None,
        *,
        proxied: bool = False,
    ) -> None:
        self._on_bound = on_bound
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
        self.agent = start_agent()
        self.coordinator = start_coordinator()
        if descriptors is not None:
            limits = (descriptors, descriptors)
            resource.prlimit(self.coordinator.pid, resource.RLIMIT_NOFILE, limits)
        self.coordinator.send(
            Configuration(options.to_json(), str(run_dir), self.token, "127.0.0.1", GENERATION)
        )
        loops = (self._forward_from_coordinator, self._forward_from_agent)
        self.threads = [threading.Thread(target=loop) for loop in loops]
        for thread in self.threads:
            thread.start()

    def _forward_from_coordinator(self) -> None:
        more = True
        while more:
            events, more = self.coordinator.receive()
            for event in events:
                match event:
                    case Bound():
                        self.endpoint = endpoint = event.endpoint
                        self._on_bound(event.endpoint)
                        if self.proxied:
                            url = urlsplit(endpoint)
                            self.proxy = Proxy((url.hostname or "", url.port or 0))
                            endpoint = f"tcp://127.0.0.1:{self.proxy.address[1]}"
                        for rank in range(self._ranks):
                            fork = Fork(rank, GENERATION, endpoint, self.token, rank)
                            self.agent.send(fork)
                    case StepResult():
                        self.steps = event.step
                    case Verdict():
                        self.verdict = event

    def _forward_from_agent(self) -> None:
        more = True
        while more:
            events, more = self.agent.receive()
            for event in events:
                if isinstance(event, WorkerExited):
                    self.coordinator.send(event)

    @property
    def log(self) -> str:
        return (self.run_dir / "logs" / "coordinator.log").read_text()

    def resident(self) -> int:
        """Return the bytes of memory that the coordinator uses."""
        return resident(self.coordinator.pid)

    def close(self) -> None:
        for process in (self.agent, self.coordinator):
            process.close_input()
        for thread in self.threads:
            thread.join(60)
        self.codes = [process.wait(60.0) for process in (self.agent, self.coordinator)]
        if self.proxy is not None:
            self.proxy.close()
