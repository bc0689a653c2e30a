"""Drives a headless Chromium over a pipe: no port, no driver program, no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
MISSING = f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium-headless-shell)"


def find_browser() -> str | None:
    """The browser's program; DAPO_MEGA_BROWSER names another one."""
    given = os.environ.get("DAPO_MEGA_BROWSER")
    return given or next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser without a window, in a process of its own, until the block ends."""

    def __init__(self, program: str, *, width: int = 1500, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        arguments = [
            "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._next_id = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol and its result; events that come meanwhile are kept in `events`."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, page: Path) -> None:
        """Open a file, and wait until its script says that it is ready, or has failed."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.evaluate(
            "new Promise((done) => { const look = () => document.body && (document.body.dataset.ready || "
            "document.body.dataset.failed) ? done() : setTimeout(look, 10); look(); })"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited. Raises RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key press that the page sees."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._answers, 2**20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
