"""Chromium, as the printed book and the tests of the site start it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from alone import CannotBuild
from playwright.sync_api import Browser, Error, sync_playwright

# The shell is Chromium without windows: a page takes half of the processor's time.
PROGRAMS = "chromium-headless-shell", "chromium", "chromium-browser"


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium where there is one, else the one that Playwright installed.

    Raises:
        CannotBuild: there is neither, or it does not start.
    """
    where = next(filter(None, map(shutil.which, PROGRAMS)), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        except Error as error:
            raise CannotBuild(
                f"Chromium does not start ({str(error).partition(chr(10))[0]}): install the "
                "system's (Debian: chromium), or run .venv/bin/playwright install chromium"
            ) from None
        try:
            yield browser
        finally:
            browser.close()
