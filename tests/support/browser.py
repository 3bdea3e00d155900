"""A browser that is installed here, without a window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def find_browser() -> str | None:
    """Chromium by one of its names: on PATH, or where Playwright keeps it."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    kept = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    playwrights = sorted(map(str, kept.glob("chromium*/chrome-*/*")), reverse=True)
    own = (
        path
        for path in playwrights
        if Path(path).name in ("chrome", "headless_shell", "chrome-headless-shell")
    )
    return next(chain(filter(None, map(shutil.which, names)), own), None)


def need_browser() -> str:
    """Where it is; skips the test where there is none."""
    browser = find_browser()
    if browser is None:
        pytest.skip("needs a browser: apt-get install chromium, or `playwright install chromium`")
    return browser


@contextmanager
def driven_browser(*flags: str) -> Iterator[Any]:
    """A `Browser` of Playwright's. Skips the test where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = need_browser()
    with playwright.sync_playwright() as drivers:
        browser = drivers.chromium.launch(executable_path=path, args=[*FLAGS, *flags])
        yield browser
        browser.close()
