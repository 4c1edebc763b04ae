"""Ray's driver of one job: holds the placement group, and serves the agents of its bundles.

Its first input line is a :class:`launcher.engines.ray.GroupRequest` as JSON; the end of its input
ends it. Its output lines are JSON objects for the launcher. When it is killed, Ray removes the
group and the actors, and each agent ends with the process of its actor.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection, Listener
from typing import IO, Any

from launcher.engines.ray import CALLER, GroupRequest
from launcher.engines.ray_pipe import END, ERROR, OUT, SIZE, ignore_signals
from pipeworker.errors import UsageError, first_line
from pipeworker.host.lifetime import die_with_parent
from pipeworker.wire import lines

_POLL_SECONDS = 1.0
_BEFORE_NOTICE = 3.0  # seconds
_CONNECT_SECONDS = 10.0
_NODES_SHOWN = 5  # kinds


class AgentActor:
    """The actor of a bundle. Ray's worker has threads, so the agent, which forks, is its child.

    Each method blocks a thread of its own. The class travels by value, so that a node without
    pipeworker reports what its interpreter says.
    """

    def start(self, line: list[str], folder: str, environment: dict[str, str]) -> str:
        """Start the agent; return why that is impossible, or ""."""
        surroundings = {**os.environ, **environment}
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # Ray sets them: the launcher's count
            if name not in environment:
                surroundings.pop(name, None)
        if not surroundings.get("CUDA_VISIBLE_DEVICES"):  # Ray hides all from a worker without one
            surroundings.pop("CUDA_VISIBLE_DEVICES", None)
        try:
            self.child = subprocess.Popen(
                [sys.executable if line[0] == "python" else line[0], *line[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=surroundings,
            )
        except OSError as error:
            return f"{socket.gethostname()}: {error.filename}: {error.strerror}"
        return ""

    def write(self, data: bytes) -> None:
        """Write to the agent's input; nothing closes it."""
        try:
            self.child.stdin.write(data)  # type: ignore[union-attr]
            self.child.stdin.flush()  # type: ignore[union-attr]
            if not data:
                self.child.stdin.close()  # type: ignore[union-attr]
        except (BrokenPipeError, ValueError):
            pass  # it has ended, which its output shows

    def read(self, number: int) -> bytes:
        """Wait for output (1) or errors (2) of the agent; nothing is their end."""
        file = self.child.stdout if number == 1 else self.child.stderr
        return os.read(file.fileno(), 1 << 16)  # type: ignore[union-attr]

    def status(self) -> int:
        """Wait for the agent's end; return its exit status as a shell has it."""
        code = self.child.wait()
        return 128 - code if code < 0 else code


class Driver:
    """The placement group of a job, and what serves its bundles."""

    def __init__(self, ray: Any, request: GroupRequest, group: Any) -> None:
        self._ray, self._request, self._group = ray, request, group
        self._environment = {CALLER: ray.util.get_node_ip_address(), **request.environment}

    def serve(self, listener: Listener) -> None:
        """Serve every command of this user that connects."""
        while True:
            connection = listener.accept()
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                peer = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", peer)[1] != os.geteuid():
                connection.close()
                continue
            threading.Thread(target=self._carry, args=(connection,), daemon=True).start()

    def _carry(self, connection: Connection) -> None:
        """Start the agent of a bundle, and carry its lines until it ends."""
        pipe = _Pipe(connection)
        first = json.loads(connection.recv_bytes())
        threading.Thread(target=pipe.receive, daemon=True).start()
        actor = self._actor(first["bundle"])
        try:
            problem = self._start(actor, first["line"], pipe)
            if problem:
                pipe.send(ERROR, problem.encode())
            status = 1 if problem else self._carry_lines(actor, pipe)
        except self._ray.exceptions.RayError as error:
            pipe.send(ERROR, _reason(error).encode())
            status = 1
        finally:
            self._ray.kill(actor)  # its bundle is free for the next one
        pipe.send(END, bytes([status]))

    def _actor(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._request.bundles[bundle])
        return (
            self._ray.remote(AgentActor)
            .options(
                num_cpus=resources.pop("CPU"),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )

    def _start(self, actor: Any, line: list[str], pipe: _Pipe) -> str:
        """Start an agent as soon as its bundle has a node; return why that is impossible, or ""."""
        request, table = self._request, self._ray.util.placement_group_table
        started = actor.start.remote(line, request.folder, self._environment)
        deadline = time.monotonic() + request.patience
        while not self._ray.wait([started], timeout=_POLL_SECONDS)[0]:
            placed = table(self._group)["state"] == "CREATED"
            text = "" if placed else _no_room(self._ray, request, "a lost bundle")
            pipe.send(OUT, lines.encode(lines.Waiting(text)))
            if pipe.closed.is_set():
                return "the launcher has ended"
            if time.monotonic() > deadline:
                return f"{text or 'Ray has not started its process'}, for {request.patience:g} s"
        return str(self._ray.get(started))

    def _carry_lines(self, actor: Any, pipe: _Pipe) -> int:
        """Carry lines until the agent ends; return its exit status."""

        def write() -> None:
            with contextlib.suppress(
                self._ray.exceptions.RayError
            ):  # reading from the agent reports it
                while True:
                    self._ray.get(actor.write.remote(data := pipe.received.get()))
                    if not data:
                        return

        def read(number: int, kind: int) -> None:
            while data := self._ray.get(actor.read.remote(number)):
                pipe.send(kind, data)

        def read_errors() -> None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                read(2, ERROR)

        threading.Thread(target=write, daemon=True).start()
        errors = threading.Thread(target=read_errors, daemon=True)
        errors.start()
        read(1, OUT)
        status = int(self._ray.get(actor.status.remote()))
        errors.join()
        return status


class _Pipe:
    """The connection of a command that carries an agent's lines.

    Attributes:
        received: what has arrived for the agent; nothing is its end.
        closed: set when the command has ended.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.closed = threading.Event()

    def receive(self) -> None:
        """Receive until the command ends: then the agent's input ends too."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.received.put(self._connection.recv_bytes())
        self.closed.set()
        self.received.put(b"")

    def send(self, kind: int, data: bytes) -> None:
        """Send a message; :meth:`receive` notices the end of the command."""
        with self._lock, contextlib.suppress(OSError):
            for start in range(0, len(data), SIZE):
                self._connection.send_bytes(bytes([kind]) + data[start : start + SIZE])


def _reason(error: Exception) -> str:
    """Return the sentence of Ray's error that says what has happened."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(text) if "node" in line or "actor" in line), text[0])


def _no_room(ray: Any, request: GroupRequest, what: str) -> str:
    """Return what Ray has no room for, and which nodes it has."""
    wanted = _listed(request.bundles[0])
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = Counter(
        _listed({name: node.get(name, 0.0) for name in request.bundles[0]}) for node in alive
    )
    nodes = "; ".join(f"{count} × {text}" for text, count in have.most_common(_NODES_SHOWN))
    more = "; …" if len(have) > _NODES_SHOWN else ""
    return f"Ray has no room for {what} of {wanted} (its nodes: {nodes or 'none'}{more})"


def _listed(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _reserve(ray: Any, request: GroupRequest, out: IO[str]) -> Any:
    """Return the placement group, once all of its bundles have nodes."""
    count = len(request.bundles)
    group = ray.util.placement_group([*map(dict, request.bundles)], strategy="STRICT_SPREAD")
    begin, shown = time.monotonic(), False
    what = "a bundle" if count == 1 else f"{count} bundles, each on a node of its own,"
    while not group.wait(_POLL_SECONDS):
        waited = time.monotonic() - begin
        if waited > request.patience:
            raise TimeoutError(f"{_no_room(ray, request, what)}, for {request.patience:g} s")
        if waited > _BEFORE_NOTICE and not shown:
            shown = True
            limit = f"waiting up to {request.patience:g} s (--set patience=SECONDS)"
            _tell(out, waits=f"{_no_room(ray, request, what)}; {limit}")
    return group


def _join(ray: Any, request: GroupRequest, out: IO[str]) -> None:
    """Connect this process to the cluster; Ray itself tries for minutes."""
    host, colon, port = request.address.rpartition(":")
    if colon:
        with contextlib.suppress(ValueError):  # of a port that Ray may understand
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    text = f"Ray at {request.address} does not answer yet"
    notice = threading.Timer(_CONNECT_SECONDS, _tell, (out,), {"waits": text})
    notice.start()
    try:
        ray.init(
            address=request.address,
            namespace="pipeworker",
            runtime_env=request.runtime_env or None,
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
        )
    finally:
        notice.cancel()


def _tell(out: IO[str], **event: Any) -> None:
    print(json.dumps(event), file=out, flush=True)


def main() -> int:
    die_with_parent(os.getppid())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no event
    fields = json.loads(sys.stdin.readline())
    request = GroupRequest(**{**fields, "bundles": tuple(fields["bundles"])})
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        _join(ray, request, out)
    except Exception as error:  # of any kind: Ray's text goes to the user
        text = f"cannot join Ray at {request.address}: {first_line(error)}"
        _tell(out, error=text, status=UsageError.exit_status)
        return 1
    ignore_signals()  # Ray has set handlers of its own
    try:
        group = _reserve(ray, request, out)
    except Exception as error:
        _tell(out, error=first_line(error), status=1)
        return 1
    name = f"pipeworker-ray-{secrets.token_hex(8)}"
    with Listener(f"\0{name}", "AF_UNIX", backlog=len(request.bundles)) as listener:
        serve = Driver(ray, request, group).serve
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        _tell(out, serves=name)
        while sys.stdin.read(1):
            pass
        ray.util.remove_placement_group(group)
        ray.shutdown()
        os._exit(0)  # the threads that serve
