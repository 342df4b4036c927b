"""A real Chromium without a window, that reaches one address and nothing else."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, Playwright, Route, ViewportSize, async_playwright

from tests.fakes.eventually import eventually

LAPTOP = ViewportSize(width=1280, height=720)

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_HOW = (
    "the console is tested in a real Chromium, and there is none: apt-get install chromium (Debian, Ubuntu), or "
    "python -m playwright install --with-deps chromium in the tests' environment, or set BACKHAUL_CHROMIUM to its path"
)


def _binary(playwright: Playwright) -> str:
    """Returns the path of a Chromium. Fails the test when there is none: a skipped one would show nothing."""
    named = os.environ.get("BACKHAUL_CHROMIUM", "")
    installed = next(filter(None, map(shutil.which, _NAMES)), "")
    found = named or installed or playwright.chromium.executable_path
    if not Path(found).is_file():
        pytest.fail(_HOW, pytrace=False)
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Starts a browser, which ends with the context."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_binary(playwright))
        try:
            yield browser
        finally:
            await browser.close()


class Onlooker:
    """One browser window of a laptop's size. What goes wrong in it, or leaves for elsewhere, is kept in `faults`."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self.addresses: list[str] = []
        """Of all requests."""
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: self.addresses.append(request.url))

    async def open(self, section: str = "overview") -> None:
        """Opens a section of the page, as a new visitor."""
        await self.page.goto(f"{self.url}#{section}")

    async def text(self, selector: str) -> str:
        """Returns what is to be read there."""
        return await self.page.inner_text(selector)

    async def until(self, script: str, timeout_s: float = 30.0) -> None:
        """Waits until a script's value is true.

        It is asked for again and again: what playwright offers for this evaluates text in the page, which its policy
        forbids.
        """

        async def true() -> bool:
            return bool(await self.page.evaluate(script))

        await eventually(true, timeout_s)

    async def reads(self, selector: str, text: str) -> None:
        """Waits until a text is to be read in the first of these elements, or any of them."""
        await self.page.locator(selector).filter(has_text=text).first.wait_for(timeout=30_000)


@asynccontextmanager
async def onlooker(browser: Browser, url: str, scheme: Literal["light", "dark"] = "light") -> AsyncIterator[Onlooker]:
    """Opens a window of its own, which knows nothing of others. Whatever it asks of other hosts fails."""
    context = await browser.new_context(viewport=LAPTOP, color_scheme=scheme, reduced_motion="reduce")
    try:
        window = Onlooker(await context.new_page(), url)

        async def only_there(route: Route) -> None:
            if urlsplit(route.request.url).netloc == urlsplit(url).netloc:
                await route.continue_()
            else:
                window.faults.append(f"asked elsewhere: {route.request.url}")
                await route.abort()

        await context.route("**/*", only_there)
        yield window
    finally:
        await context.close()
