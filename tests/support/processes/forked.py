"""Processes that the warm server forks, with the interface of `subprocess.Popen`."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from support.processes.interpreter import MAXIMUM

LIGHT_MODULES = (
    *("zmq", "rich.progress", "encodings.idna", "support.processes.forked"),
    *("cli", "launcher.local", "launcher.torchrun", "launcher.foreground"),
    "pipeworker.coordinator.service",
)
"""The modules of launchers and coordinators, which never import torch."""
MODULES = (
    *LIGHT_MODULES,
    *("torch._dynamo", "safetensors.torch", "pipeworker.session.train"),
    *("pipeworker.host.agent", "pipeworker.worker.process"),
    *("pipeworker.worker.worker", "pipeworker.worker.hooks", "pipeworker.record.weights.export"),
    *("pipeworker.worker.model.survey_process", "pipeworker.worker.data.reader_process"),
)
"""The modules of the tests' processes, which the server imports once."""
MODULE = "support.processes.server"
"""The module that the server runs."""
_LIGHT = b"-light"
"""The end of the address of a server that has not imported torch: its forks cost a third."""
_TESTS = Path(__file__).parents[2]
_PATIENCE = 120.0
"""The seconds within which the server must have imported its modules."""
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_entered: list[tuple[str, int]] = []
"""The network namespace that this process has entered, and a descriptor of the server's."""


class Forked:
    """A Python command line in a process of its own, forked by a server.

    It has the parts of :class:`subprocess.Popen` that tests and :class:`LineProcess` use.
    """

    def __init__(
        self,
        server: bytes,
        command: list[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        text: bool = True,
        bound: bool = True,
        namespace: str = "",
    ) -> None:
        """Start the process.

        Args:
            server: the address of the server.
            command: the interpreter, then its arguments.
            stdin: as of :class:`subprocess.Popen`, and so are the other streams.
            stdout: as `stdin`.
            stderr: as `stdin`.
            cwd: its folder; by default that of this process.
            env: its environment; by default that of this process.
            text: whether the streams of this object are text.
            bound: whether it is killed when this object's process is gone.
            namespace: its network namespace; by default that of this process.
        """
        self.args = command
        self.returncode: int | None = None
        self._readers: dict[str, threading.Thread] = {}
        self._read = {"stdout": "", "stderr": ""}
        ends = [_ends(given, number) for number, given in enumerate((stdin, stdout, stderr))]
        request = {
            "words": command[1:],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "name": _name(command),
            "bound": bound,
            "namespace": namespace or (_entered[0][0] if _entered else ""),
        }
        self._connection = _connect_for(command, server)
        data = json.dumps(request).encode()
        assert len(data) < MAXIMUM
        socket.send_fds(self._connection, [data], [child_end for _, child_end in ends])
        for given, (_, child_end) in zip((stdin, stdout, stderr), ends, strict=True):
            if given is not None:
                os.close(child_end)
        self.pid: int = self._receive(None)["pid"]
        mode = "" if text else "b"
        files: list[IO[Any] | None] = [
            None if own_end is None else os.fdopen(own_end, ("w" if number == 0 else "r") + mode)
            for number, (own_end, _) in enumerate(ends)
        ]
        self.stdin, self.stdout, self.stderr = files

    def _receive(self, seconds: float | None) -> dict[str, Any]:
        """Return the server's next message; an empty one if none arrives within `seconds`."""
        if not select.select([self._connection], [], [], seconds)[0]:
            return {}
        data = self._connection.recv(4096)
        if not data:
            raise ConnectionError("the server of the tests has ended")
        message: dict[str, Any] = json.loads(data)
        return message

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            message = self._receive(timeout)
            if not message:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = message["exited"]
            self._connection.close()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close the input, read output and error to their ends, and wait for the exit status."""
        if self.stdin is not None:
            self.stdin.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        for name in ("stdout", "stderr"):
            if name not in self._readers:
                self._readers[name] = threading.Thread(target=self._drain, args=(name,))
                self._readers[name].daemon = True
                self._readers[name].start()
        for reader in self._readers.values():
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        return self._read["stdout"], self._read["stderr"]

    def _drain(self, name: str) -> None:
        file: IO[str] | None = getattr(self, name)
        if file is not None and not file.closed:
            with file:
                self._read[name] = file.read()


def stand_for(server: bytes, namespace: str = "") -> NoReturn:
    """Have the server fork this interpreter's program, with our streams; forward signals to it.

    Args:
        server: its address.
        namespace: as of :data:`NAMESPACE`, if this interpreter is in another one than the server.
    """
    if namespace:
        name, _, pid = namespace.partition(":")
        _entered[:] = [(name, os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))]
    line = [sys.executable, *sys.orig_argv[1:]]
    child = Forked(server, line, stdin=0, stdout=1, stderr=2)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: os.kill(child.pid, received))
    os._exit(child.wait() % 256)


def _ends(given: int | None, number: int) -> tuple[int | None, int]:
    """Return our end of a stream and the child's."""
    if given is None:
        return None, number
    if given == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if given >= 0:
        return None, os.dup(given)
    assert given == subprocess.PIPE
    read, write = os.pipe()
    return (write, read) if number == 0 else (read, write)


def _name(command: list[str]) -> str:
    """Return the name of a process: a module of ours, as ``coordinator``, or the script's name."""
    words = [word for word in command[1:] if word != "-u"]
    if words[0] == "-c":
        ours = len(words) > 3 and words[3].startswith("pipeworker.")
        program = words[3 if ours else -1] if len(words) > 2 else "python"
    else:
        program = Path(words[1 if words[0] == "-m" else 0]).stem
    return program.removesuffix(".service").rpartition(".")[2]


def _connect(address: bytes) -> socket.socket:
    with _home():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _connect_for(command: list[str], server: bytes) -> socket.socket:
    """Connect to the server that forks a command: to the light one if that never imports torch."""
    usual = server.removesuffix(_LIGHT)
    if _name(command) == "coordinator" or command[1:4] == ["-m", "pipeworker", "launch"]:
        with suppress(ConnectionRefusedError):  # a server that is not warm is alone
            return _connect(usual + _LIGHT)
    return _connect(usual)


def enter(namespace: str) -> None:
    """Move this thread, and processes it starts, into a network namespace (``ip netns``).

    The host name becomes that of the namespace, as on a host of its own.
    """
    _entered[:] = [(namespace, os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))]
    _enter(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(namespace)


def _enter(namespace: str) -> None:
    with Path("/run/netns", namespace).open() as file:
        _set(file.fileno())


def _set(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def _home() -> Iterator[None]:
    """Return to the server's namespace inside the context: its address exists only there."""
    if not _entered:
        yield
        return
    namespace, home = _entered[0]
    _set(home)
    try:
        yield
    finally:
        _enter(namespace)


class Server:
    """The servers of a test run, which the first of its processes that needs them starts.

    One of them is light: it forks what never imports torch. Their sockets have abstract names, in
    no folder, so that no end of the run leaves a file.

    Args:
        run: a name; processes that use the same name share a server.
        warm: whether a server that is started here first imports the modules of tests.
    """

    def __init__(self, run: str, *, warm: bool = True) -> None:
        self.address = f"\0pipeworker-tests-{run}".encode()
        self._light = _Lease(self.address + _LIGHT, LIGHT_MODULES) if warm else None
        self._lease = _Lease(self.address, MODULES if warm else ())
        self.pid = self._lease.pid

    def start(self, command: list[str], **options: Any) -> Forked:
        """Run a Python command line; options are those of :class:`Forked`."""
        return Forked(self.address, command, **options)

    def close(self) -> None:
        """Return the leases; a server ends with its last one."""
        for lease in filter(None, (self._light, self._lease)):
            lease.close()


class _Lease:
    """A lease on a server, which is started if there is none."""

    def __init__(self, address: bytes, modules: Sequence[str]) -> None:
        self._address, self._modules = address, modules
        self._process: subprocess.Popen[bytes] | None = None
        for _ in range(3):
            if self._join():
                return
            self._launch()
        assert self._join(), "the server of the tests does not start"

    def _join(self) -> bool:
        """Take a lease on a server; return False if there is none, or it has just ended."""
        try:
            self._connection = _connect(self._address)
        except ConnectionRefusedError:
            return False
        self._connection.settimeout(_PATIENCE)
        try:
            self._connection.send(b'{"lease": true}')
            reply = self._connection.recv(4096)
        except ConnectionError:
            reply = b""
        if not reply:
            self._connection.close()
            return False
        self.pid = json.loads(reply)["pid"]
        return True

    def _launch(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self._address)
            except OSError:
                return  # another process has just started one
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(listener.fileno()), *self._modules],
                cwd=_TESTS,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        self._connection.close()
