"""`python -m tests.serve.board_screenshot` makes docs/images/overview.png: the overview's panels,
drawn by dashboards/board_page.py, of two ranks at work that a real Prometheus watches.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from dashboards import board_page
from tests.serve.browser import chromium
from tests.serve.conftest import Server
from tests.serve.front import ROOT, served
from tests.serve.prometheus_server import Prometheus, prometheus

IMAGE = ROOT / "docs/images/overview.png"
SIZE = {"width": 1100, "height": 900}
SCALE = 0.85  # for MAX_BYTES
MAX_BYTES = 150_000
HISTORY_S = 90  # of lines to show, at least


def main() -> str | None:
    """What is wrong with the image; None for a good one."""
    config = {"ranks": 2, "context_tokens": 2048, "max_sequences": 2, "max_queue_requests": 1}
    with tempfile.TemporaryDirectory() as name, served(config) as base_url:
        folder, stop = Path(name), threading.Event()
        with prometheus(folder, {"nrank": f"{base_url}/metrics"}) as watcher:
            clients = [threading.Thread(target=ask, args=(base_url, at, stop)) for at in range(4)]
            for client in clients:
                client.start()
            try:
                old = f"nrank_build_info offset {HISTORY_S}s"
                Server(base_url).until("some history", lambda: bool(watcher.query(old)))
                take("overview", IMAGE, watcher, folder)
            finally:
                stop.set()
                for client in clients:
                    client.join(120)
    return fault_of(IMAGE)


def ask(base_url: str, at: int, stop: threading.Event) -> None:
    """One more client than there is room for: it is refused now and then."""
    server, turn = Server(base_url), 0
    while not stop.is_set():
        turn += 1
        prompt = "The river " * (10 + 30 * (turn % 3)) + f"of client {at}"
        body = server.body(prompt, 16 + 24 * (turn % 4))
        if server.http.post("/v1/completions", json=body).status_code != 200:
            stop.wait(1.0)


def take(board: str, image: Path, watcher: Prometheus, folder: Path) -> None:
    """The board's last two minutes; every panel of it has to show something."""
    file = folder / f"{board}.html"
    flags = ["--board", board, "--minutes", "2", "--out", str(file)]
    fault = board_page.main([*flags, "--prometheus", str(watcher.http.base_url)])
    assert fault is None, fault
    with chromium() as browser:
        page = browser.new_page(
            viewport=SIZE,  # type: ignore[arg-type]
            color_scheme="light",
            device_scale_factor=SCALE,
        )
        page.goto(file.as_uri())
        assert page.locator(".panel").count() > 0
        assert page.locator(".panel:not(:has(path)):not(:has(td))").count() == 0
        image.parent.mkdir(exist_ok=True)
        page.screenshot(path=image, full_page=True)


def fault_of(image: Path) -> str | None:
    size = image.stat().st_size
    return f"{image} has {size} bytes, the limit is {MAX_BYTES}" if size > MAX_BYTES else None


if __name__ == "__main__":
    sys.exit(main())
