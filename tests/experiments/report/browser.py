"""A headless Chromium, driven through its DevTools pipe: no driver and no library is needed.

with Browser(profile) as browser:
    page = browser.open(path, width=360)
    page("document.title")          # evaluates, awaits, and returns JSON
    page.click(".theme"), page.key("+"), page.wheel(".plot", -200)
    page.said                       # errors and warnings of the console
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars",
    "--allow-file-access-from-files", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0  # seconds for an answer, on a busy machine
#: codes of keys that are no characters
_CODES = {"Enter": 13, "Escape": 27, " ": 32, "Tab": 9,
          "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip


def executable() -> str | None:
    """Chromium or Chrome, where the system has one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((which for name in names if (which := shutil.which(name))), None)


class Browser:
    """The process; messages are JSON that ends with a zero byte, on descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        command = executable()
        assert command is not None
        self.events: list[dict[str, Any]] = []
        self._unread = b""
        self._last = 0
        theirs, self._out = os.pipe()
        self._in, also_theirs = os.pipe()
        # above 4, so that one does not overwrite the other on its way
        ends = [os.dup2(fd, fd + 50) for fd in (theirs, also_theirs)]
        profile.mkdir(parents=True, exist_ok=True)
        log = str(profile / "browser.log")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._process = os.posix_spawn(
            command,
            [command, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ | {"HOME": str(profile)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
                (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
                (os.POSIX_SPAWN_OPEN, 2, log, flags, 0o600),
            ],
            setpgroup=0,
        )
        for fd in (theirs, also_theirs, *ends):
            os.close(fd)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while True:
            answer = self._read(end - time.monotonic())
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self, patience: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(patience, 0))
            assert ready, "the browser does not answer"
            read = os.read(self._in, 1 << 16)
            assert read, "the browser has ended"
            self._unread += read
        one, _, self._unread = self._unread.partition(b"\0")
        return json.loads(one)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False,
        scripts: bool = True, anchor: str = "",
    ) -> Page:  # fmt: skip
        """A file in a new page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        small = width < 600
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=2 if small else 1, mobile=small)  # fmt: skip
        page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.prefer("dark" if dark else "light")
        page.call("Page.navigate", url=path.as_uri() + anchor)
        page.wait_for("document.readyState === 'complete'")
        return page


class Page:
    """One page of the browser; calling it evaluates JavaScript."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **params)

    def __call__(self, script: str) -> Any:
        """The value of an expression."""
        call = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                         awaitPromise=True, userGesture=True)  # fmt: skip
        assert "exceptionDetails" not in call, call["exceptionDetails"]
        return call["result"].get("value")

    def wait_for(self, script: str, seconds: float = 10.0) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self(f"Boolean({script})"):
            assert time.monotonic() < end, f"never: {script}"
            time.sleep(0.02)

    def prefer(self, scheme: str) -> None:
        """Light or dark, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def settle(self) -> None:
        """Until what was changed is drawn."""
        self("new Promise(d => requestAnimationFrame(() => requestAnimationFrame(() => d(1))))")

    # --- what a reader does -------------------------------------------------------------------

    def middle(self, selector: str, dx: float = 0.5, dy: float = 0.5) -> tuple[float, float]:
        """A place of an element, scrolled into view."""
        actual = self(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            f"return [b.left + {dx} * b.width, b.top + {dy} * b.height]; }})()"
        )
        return actual[0], actual[1]

    def mouse(self, event: str, at: tuple[float, float], **more: Any) -> None:
        """A mouse event."""
        self.call("Input.dispatchMouseEvent", type=event, x=at[0], y=at[1], **more)

    def click(self, selector: str, count: int = 1, modifiers: int = 0) -> None:
        """A real click on the middle of an element."""
        at = self.middle(selector)
        self.mouse("mouseMoved", at)
        for n in range(1, count + 1):
            options: dict[str, Any] = {"button": "left", "clickCount": n, "modifiers": modifiers}
            self.mouse("mousePressed", at, **options)
            self.mouse("mouseReleased", at, **options)
        self.settle()

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """From one place of an element to another, in shares of its size."""
        a = self.middle(selector, *start)
        b = self.middle(selector, *end)
        self.mouse("mouseMoved", a)
        self.mouse("mousePressed", a, button="left", buttons=1, clickCount=1)
        for share in (0.3, 0.6, 1.0):
            at = a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])
            self.mouse("mouseMoved", at, button="left", buttons=1)
        self.mouse("mouseReleased", b, button="left", clickCount=1)
        self.settle()

    def wheel(self, selector: str, by: float) -> None:
        """The wheel over the middle of an element."""
        at = self.middle(selector)
        self.mouse("mouseMoved", at)
        self.mouse("mouseWheel", at, deltaX=0, deltaY=by)
        self.settle()

    def pinch(self, selector: str, start: float, end: float) -> None:
        """Two fingers on an element, this far apart before and after, in shares of its width."""
        box = f"document.querySelector({json.dumps(selector)}).clientWidth"
        x, y = self.middle(selector)
        width = self(box)
        self.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
        for event, distance in (("touchStart", start), ("touchMove", end)):
            ends = (-0.5 * distance * width, 0.5 * distance * width)
            points = [{"x": x + dx, "y": y, "id": i} for i, dx in enumerate(ends)]
            self.call("Input.dispatchTouchEvent", type=event, touchPoints=points)
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def key(self, key: str, times: int = 1) -> None:
        """A key, on whatever has the focus."""
        if key == "Enter":
            words = "\r"
        elif len(key) == 1:
            words = key
        else:
            words = ""
        code = _CODES.get(key, ord(key.upper()[0]))
        for _ in range(times):
            if words:
                down = {"text": words}
            else:
                down = {}
            common: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
            event_type = "keyDown" if words else "rawKeyDown"
            self.call("Input.dispatchKeyEvent", type=event_type, **common, **down)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """A picture of the page, or of what is seen of it."""
        params: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            box = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params["clip"] = {**box, "x": 0, "y": 0, "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **params)["data"]))
        return path

    # --- what it says ------------------------------------------------------------------------

    def _events(self, *methods: str) -> list[dict[str, Any]]:
        self("1")  # so that what was sent before is read
        events = (e for e in self._browser.events if e.get("sessionId") == self._session)
        return [e["params"] for e in events if e["method"] in methods]

    @property
    def said(self) -> list[str]:
        """Errors and warnings: of the console, uncaught, and of the browser itself."""
        out = [
            f"{e['type']}: {[a.get('value') for a in e['args']]}"
            for e in self._events("Runtime.consoleAPICalled")
            if e["type"] in ("error", "warning", "assert")
        ]
        out += [str(e["exceptionDetails"]) for e in self._events("Runtime.exceptionThrown")]
        return out + [str(e["entry"]) for e in self._events("Log.entryAdded")]

    @property
    def requested_urls(self) -> list[str]:
        """Addresses that were asked for, other than data inside of the page."""
        collected = [e["request"]["url"] for e in self._events("Network.requestWillBeSent")]
        return [url for url in collected if not url.startswith("data:")]
