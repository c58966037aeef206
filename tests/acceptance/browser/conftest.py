"""A real Chromium for tests of what people look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window, one for all tests of this process; skips where there is none."""
    chromium = shutil.which("chromium-headless-shell")
    if chromium is None:
        pytest.skip("needs Chromium: install Debian's package chromium-headless-shell")
    api = pytest.importorskip("playwright.sync_api")
    switches = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=switches)
        yield running
        running.close()


@pytest.fixture
def console_errors() -> list[str]:
    """What the page has complained of so far: errors on its console, and uncaught exceptions.

    A test of a page ends with ``assert console_errors == []``, or names what it expects.
    """
    return []


@pytest.fixture
def page(browser: Browser, console_errors: list[str]) -> Iterator[Page]:
    """A page with cookies and storage of its own; what it complains of goes to ``console_errors``."""

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            console_errors.append(f"{message.text} ({message.location.get('url', '')})")

    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=False)
    context.set_default_timeout(1000 * PATIENCE)
    opened = context.new_page()
    opened.on("console", heard)
    opened.on("pageerror", lambda error: console_errors.append(str(error)))
    yield opened
    context.close()
