"""A headless Chromium, driven through a pipe by its DevTools protocol, so that no other package is needed."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARIES = ("chromium", "chromium-browser", "google-chrome")
LOAD_S = 60.0


def chromium() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


class Page:
    """One page; ``complaints`` are its console messages, exceptions and refused loads."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._id = write, read, b"", 0
        self.complaints: list[str] = []
        self.loaded = False
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Loads a file and waits until it is there."""
        self.loaded = False
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + LOAD_S
        while not self.loaded and time.monotonic() < until:
            self.evaluate("1")
        assert self.loaded, f"{path} did not load in {LOAD_S} s"

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, of the test and not of the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are taken note of."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method = event.get("method", "")
        if method == "Page.loadEventFired":
            self.loaded = True
        if method == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"asks for {url}")
        if method in (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
            "Network.loadingFailed",
        ):
            self.complaints.append(json.dumps(event))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser_page(binary: str, profile: Path) -> Iterator[Page]:
    """A page of a browser that ends with the block; ``profile`` is its folder."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    # The pipe's two ends must be descriptors 3 and 4 of the browser.
    script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", script, binary, *options, f"--user-data-dir={profile}"],
        pass_fds=(to_browser, from_browser),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(write, read)
    finally:
        os.close(write)
        os.close(read)
        process.kill()
        process.wait()
