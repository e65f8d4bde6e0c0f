"""Chromium, as the printed book and the tests of the site start it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

# The shell is Chromium without windows: a page takes half of the processor's time.
PROGRAMS = "chromium-headless-shell", "chromium", "chromium-browser"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium where there is one, else the one that Playwright installed."""
    where = next(filter(None, map(shutil.which, PROGRAMS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
