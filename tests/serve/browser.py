"""A headless Chromium: the machine's own, else the one that playwright has fetched.

`python -m tests.serve.browser` ends with 1 where there is none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Playwright, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE = {"width": 390, "height": 844}
# Nothing but the page is asked for; a container's root has no sandbox to run in.
FLAGS = (
    "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
)  # fmt: skip


def program(playwright: Playwright) -> str | None:
    own = playwright.chromium.executable_path
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return found or (own if os.path.exists(own) else None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is none."""
    with sync_playwright() as playwright:
        path = program(playwright)
        if path is None:
            pytest.skip("needs Chromium: make browser")
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    with sync_playwright() as started:
        sys.exit(program(started) is None)
