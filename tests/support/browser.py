"""A headless Chromium, by its DevTools protocol over a pipe: loads pages and uses them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""The path of the browser; None if this host has none."""
_END = b"\0"
_CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page of a browser, whose files are in a folder that nothing else uses."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER
        (theirs, self._write), (self._read, back) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs, back)]
        words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        more = (f"--user-data-dir={folder}", "--disable-dev-shm-usage", "--hide-scrollbars")
        self._pid = os.posix_spawn(
            BROWSER,
            [BROWSER, *words, *more],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),  # commands
                (os.POSIX_SPAWN_DUP2, ends[1], 4),  # answers
            ],
            setsid=True,
        )
        for end in (theirs, back, *ends):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        """Errors of the page's script, and what it wanted to load."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + _END)
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while _END not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(_END)
        answer: dict[str, Any] = json.loads(line)
        params = answer.get("params", {})
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(str(params["entry"]["text"]))
            case "Network.requestWillBeSent":
                self.problems.append(f"loads {params['request']['url']}")
        return answer

    def open(self, page: Path) -> None:
        """Load a page, until it has drawn itself."""
        self.send("Page.navigate", url=page.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.problems = [p for p in self.problems if p != f"loads {page.as_uri()}"]

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is waited for."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, for what has the focus."""
        text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": _CODES[key]}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def show(self, width: int, height: int, *, media: str = "screen", dark: bool = False) -> None:
        """Show the page in a window, on paper (``print``), light or dark."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
