"""Chromium without a window, driven through its own DevTools pipe: no driver to install beside the browser.

Playwright's wheel is 50 MB and Selenium wants a chromedriver of the browser's version; what is needed here is to open a
file, evaluate expressions, press keys and take pictures, and that is a page of messages in JSON.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "there is no chromium on PATH (Debian: apt-get install --no-install-recommends chromium)"


class Browser:
    """One page. `problems` collects what it wrote to the console as an error, exceptions, and requests to a network."""

    def __init__(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert CHROMIUM, MISSING
        self.problems: list[str] = []
        self._number = 0
        self._profile = tempfile.mkdtemp(prefix="tilewise-chromium-")
        command_out, self._to = os.pipe()
        self._from, answer_in = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        # The browser reads commands at descriptor 3 and answers at 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{command_out} 4>&{answer_in}', "bash", CHROMIUM,
             "--remote-debugging-pipe", f"--user-data-dir={self._profile}", *options, "about:blank"],
            pass_fds=(command_out, answer_in), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_out)
        os.close(answer_in)
        self._waiting = b""
        self._session: str | None = None
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        self.prefer_dark(dark)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        with suppress(EOFError, BrokenPipeError):  # it may be quicker than its answer
            self.send("Browser.close")
        self._process.wait(20)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command, and its answer. RuntimeError if it is refused."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            part = os.read(self._from, 1 << 20)
            if not part:
                raise EOFError("the browser is gone")
            self._waiting += part
        message, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        bad_console = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning")
        bad_log = method == "Log.entryAdded" and params["entry"]["level"] == "error"
        if bad_console or bad_log or method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params)[:500])
        if method == "Network.requestWillBeSent" and params["request"]["url"].startswith(("http:", "https:", "ws")):
            self.problems.append(f"a request to {params['request']['url']}")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise's when it is there."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Until the condition holds; the page's own clock is asked, a frame at a time."""
        self.run(
            f"new Promise((yes, no) => {{ const end = performance.now() + {1000 * seconds}; const look = () => "
            f"({condition}) ? yes() : performance.now() > end ? no(new Error('in vain')) : setTimeout(look, 20); "
            "look(); })"
        )

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key: "ArrowRight", "Home", " ", "b"."""
        what = {"key": key, "modifiers": 8 if shift else 0}
        if len(key) == 1:
            what["text"] = key
        self.send("Input.dispatchKeyEvent", type="keyDown", **what)
        self.send("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in what.items() if k != "text"})

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    def prefer_dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what the window shows, or of the whole page."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
