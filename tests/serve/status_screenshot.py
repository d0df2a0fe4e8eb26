"""`python -m tests.serve.status_screenshot` makes docs/images/status.png: four ranks at work, with
an `npu-smi` that is a stand-in.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import expect

from cluster.status_page import DASH
from tests.serve.browser import chromium
from tests.serve.conftest import Server
from tests.serve.front import ROOT, served
from tests.serve.scripted_sensor import ScriptedSensor

IMAGE = ROOT / "docs/images/status.png"
SIZE = {"width": 1100, "height": 760}
MAX_BYTES = 150_000
CELSIUS = (71, 68, 88, 74)
NUM_TOKENS = 1500
LIMIT_MS = 60_000


def main() -> str | None:
    """What is wrong with the image; None for a good one."""
    with tempfile.TemporaryDirectory() as folder:
        ScriptedSensor(Path(folder), len(CELSIUS)).set(CELSIUS)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        config = {"ranks": len(CELSIUS), "sensors": "on", "context_tokens": 2048}
        with served(config) as base_url:
            take(base_url)
    size = IMAGE.stat().st_size
    return f"{IMAGE} has {size} bytes, the limit is {MAX_BYTES}" if size > MAX_BYTES else None


def take(base_url: str) -> None:
    server = Server(base_url)
    streams = [server.stream(text, NUM_TOKENS) for text in ("The river", "Count from 3")]
    with chromium() as browser:
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(f"{base_url}/status")
        expect(page.locator(".rank", has_text="°C")).to_have_count(len(CELSIUS), timeout=LIMIT_MS)
        tile = page.locator(".tiles .card", has_text="generated tokens/s").locator("b")
        expect(tile).not_to_have_text(DASH, timeout=LIMIT_MS)
        IMAGE.parent.mkdir(exist_ok=True)
        page.screenshot(path=IMAGE)
    for stream in streams:
        stream.leave()


if __name__ == "__main__":
    sys.exit(main())
