"""Processes that the warm server forks, seen as `subprocess.Popen` shows those it starts."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from support.interpreter import MAXIMUM

MODULES = (
    *("torch._dynamo", "zmq", "rich.progress", "safetensors.torch"),
    *("cli", "launcher.local", "launcher.torchrun", "pipeworker.session.pipeline"),
    *("pipeworker.coordinator.service", "pipeworker.host.forkserver"),
    *("pipeworker.worker.service", "pipeworker.record.export.weights"),
)
"""What the processes of tests need, imported once."""
_TESTS = Path(__file__).parents[1]
_PATIENCE = 120.0
"""Seconds that the server may take to import what it imports."""
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_entered: list[tuple[str, int]] = []
"""The namespace of the network that this process has entered, and a descriptor of the server's."""


class Forked:
    """A Python command line in a process of its own, forked by a server.

    It has those parts of :class:`subprocess.Popen` that tests and :class:`LineProcess` use.
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
        """Start it.

        Args:
            command: the interpreter, then what it is given.
            bound: it is killed when this object's process is gone.
            namespace: of the network, where it is not that of this process.
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
        self._connection = _connect(server)
        data = json.dumps(request).encode()
        assert len(data) < MAXIMUM
        socket.send_fds(self._connection, [data], [theirs for _, theirs in ends])
        for given, (_, theirs) in zip((stdin, stdout, stderr), ends, strict=True):
            if given is not None:
                os.close(theirs)
        self.pid: int = self._hear(None)["pid"]
        mode = "" if text else "b"
        files: list[IO[Any] | None] = [
            None if ours is None else os.fdopen(ours, ("w" if number == 0 else "r") + mode)
            for number, (ours, _) in enumerate(ends)
        ]
        self.stdin, self.stdout, self.stderr = files

    def _hear(self, seconds: float | None) -> dict[str, Any]:
        """What the server says next; nothing when it does not within so many seconds."""
        if not select.select([self._connection], [], [], seconds)[0]:
            return {}
        data = self._connection.recv(4096)
        if not data:
            raise ConnectionError("the server of the tests has ended")
        said: dict[str, Any] = json.loads(data)
        return said

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            said = self._hear(timeout)
            if not said:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = said["exited"]
            self._connection.close()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read output and error to their ends, and wait for the exit status."""
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


def stand_for(server: bytes) -> NoReturn:
    """Have the server fork what this interpreter was started for, with our streams and signals."""
    line = [sys.executable, *sys.orig_argv[1:]]
    child = Forked(server, line, stdin=0, stdout=1, stderr=2)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda taken, _: os.kill(child.pid, taken))
    os._exit(child.wait() % 256)


def _ends(given: int | None, number: int) -> tuple[int | None, int]:
    """Our end of a stream and theirs."""
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
    """Of a process: what of ours it runs, as ``coordinator``, or the script's own name."""
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


def enter(namespace: str) -> None:
    """Make this thread, and what it starts, part of a namespace of the network (``ip netns``).

    As on a host of its own, that is its name.
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
    """Sockets made here are in the server's namespace, which its address belongs to."""
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
    """The server of a test run, started by whoever of its processes needs it first.

    Its socket has a name in no folder, so that nothing is left behind however the run ends.

    Args:
        run: who says the same has the same server.
        warm: if it is started here, it imports what tests need first.
    """

    def __init__(self, run: str, *, warm: bool = True) -> None:
        self._modules = MODULES if warm else ()
        self.address = f"\0pipeworker-tests-{run}".encode()
        self._process: subprocess.Popen[bytes] | None = None
        for _ in range(3):
            if self._join():
                return
            self._launch()
        assert self._join(), "the server of the tests does not start"

    def _join(self) -> bool:
        """Take a lease on a server; False when there is none, or it has just ended."""
        try:
            self._lease = _connect(self.address)
        except ConnectionRefusedError:
            return False
        self._lease.settimeout(_PATIENCE)
        try:
            self._lease.send(b'{"lease": true}')
            said = self._lease.recv(4096)
        except ConnectionError:
            said = b""
        if not said:
            self._lease.close()
            return False
        self.pid = json.loads(said)["pid"]
        return True

    def _launch(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self.address)
            except OSError:
                return  # another one has been quicker
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.server", str(listener.fileno()), *self._modules],
                cwd=_TESTS,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, command: list[str], **options: Any) -> Forked:
        """Run a Python command line; options are those of :class:`Forked`."""
        return Forked(self.address, command, **options)

    def close(self) -> None:
        """Give the lease back; the server ends with the last one."""
        self._lease.close()
