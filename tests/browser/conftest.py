"""A headless Chromium that opens pages from the disk, and forgives neither noise nor requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gradtrace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

Open = Callable[..., "Page"]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Start the browser once; these tests were asked for, so that without one they fail."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.fail(f"no browser: none of {', '.join(_NAMES)} is on PATH", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a trace; fail at the end if it complained or asked for anything."""
    noise: list[str] = []
    contexts: list[BrowserContext] = []

    def open_page(trace: gradtrace.Trace, *, export: Any = None, **options: Any) -> Page:
        path = trace.export(tmp_path / f"page{len(contexts)}.html", **(export or {}))
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(8_000)
        page.on("console", lambda message: noise.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: noise.append(f"error: {error}"))
        page.on("dialog", lambda dialog: noise.append(f"dialog: {dialog.message}"))
        address = path.as_uri()
        page.on("request", lambda request: _note(request.url, address, noise))
        page.goto(address)
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not noise


def _note(url: str, address: str, noise: list[str]) -> None:
    if url != address and not url.startswith("data:"):
        noise.append(f"request: {url}")
