"""The viewer's page: served on a thread, and shown by a browser."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import uvicorn

from stages.view.app import make_app


@contextlib.contextmanager
def serving(viewer, port=0):
    """Answers on a thread: the address with the token, without a slash at its end."""
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(make_app(viewer), log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/{viewer.token}"
    finally:
        server.should_exit = True
        thread.join()


def get(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes, dict]:
    """The status, content and headers of an answer; with ``data`` they are posted."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


class Page:
    """One page of the browser at an address, with what its console complained about. ``base`` is
    part of each state that does not say otherwise."""

    base = ""

    def __init__(self, browser, address: str, **options) -> None:
        self.address, self.complaints = address, []
        self.page = browser.new_page(viewport={"width": 1280, "height": 800}, **options)
        self.page.set_default_timeout(10_000)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._listen)

    def _listen(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, state: str = "") -> None:
        """Goes to a state as a link does, and waits until it is shown."""
        if self.base.partition("=")[0] not in state:
            state = "&".join(filter(None, [state, self.base]))
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{state}")
        self.page.wait_for_selector("html[data-ready]")

    def until(self, expression: str) -> None:
        """Waits until an expression is true. Playwright's own way needs eval, which the page's
        content security policy forbids."""
        deadline = time.monotonic() + 10
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def state(self) -> dict[str, str]:
        address = self.page.evaluate("location.hash")  # Playwright's own hears of it later
        return dict(pair.split("=") for pair in address[1:].split("&"))

    def saved(self, button: str) -> bytes:
        """The file that a button saves."""
        with self.page.expect_download() as download:
            self.page.click(button)
        return Path(download.value.path()).read_bytes()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def over(self, token: int, grid: tuple[int, int], act: str = "hover", pane: int = 0) -> None:
        """Hovers or clicks a patch of the large picture."""
        canvas = self.page.locator("#panes canvas").nth(pane)
        box, (y, x) = canvas.bounding_box(), divmod(token, grid[1])
        x, y = (x + 0.5) * box["width"] / grid[1], (y + 0.5) * box["height"] / grid[0]
        getattr(canvas, act)(position={"x": x, "y": y})


def unpacked(message: bytes, name: str) -> tuple[dict, np.ndarray]:
    """The header and one array of a message to the page (pack in stages/view/viewer.py)."""
    start = 4 + int.from_bytes(message[:4], "little")
    header = json.loads(message[4:start])
    for each, (dtype, shape, size) in header["arrays"].items():
        if each == name:
            array = np.frombuffer(message[start : start + size], dtype).reshape(shape)
            return header, array
        start += size
    raise KeyError(name)
