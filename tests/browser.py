"""Debian's Chromium, without a window: opens pages of this project, and tells what a person would see and hear of.

It is spoken to through two pipes, in the DevTools protocol: JSON objects that end in a NUL byte. Nothing is installed
for it but Chromium itself (`apt-get install chromium`).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60.0  # that a page, or Chromium itself, may take
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
]  # fmt: skip


def require_chromium() -> str:
    """Return the programme, or skip the test; where LM_PCFG_REQUIRE_CHROMIUM is set, as in CI, it has to be there."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("LM_PCFG_REQUIRE_CHROMIUM"):
            pytest.fail("LM_PCFG_REQUIRE_CHROMIUM is set, and there is no Chromium: apt-get install chromium")
        pytest.skip("no Chromium: apt-get install chromium")
    return found


class Browser:
    """One tab of it."""

    def __init__(self, write: int, read: int):
        self._write, self._read, self._rest, self._number = write, read, b"", 0
        self.errors: list[str] = []  # of the console, of scripts, and what the page's policy forbade
        self.requests: list[str] = []  # addresses that were asked for
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and return the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """Return the next message, and note what it tells."""
        limit = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, limit - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        raw, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialogue: {told['message']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        return message

    def open(self, address: str) -> None:
        """Open a page and wait until all of it is there."""
        self.call("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def look(self, width: int, height: int = 844, scheme: str = "light") -> None:
        """Take a screen of this size, light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, script: str) -> Any:
        """Return what a script says, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return int(self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, file: Path, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends have numbers that are not those of Chromium's own."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return read, write


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Start it, with its own files in a folder, and end it."""
    programme = require_chromium()
    to_it, write = _pipe()
    read, from_it = _pipe()
    # It reads from file 3 and writes to file 4.
    command = ["bash", "-c", f'exec 3<&{to_it} 4>&{from_it}; exec "$@"', "-", programme, *OPTIONS]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}"], pass_fds=(to_it, from_it), stdout=log, stderr=log
        )
    os.close(to_it)
    os.close(from_it)
    try:
        browser = Browser(write, read)
        yield browser
        browser._session = None
        browser.call("Browser.close")
        process.wait(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)
