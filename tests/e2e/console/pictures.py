"""Takes the pictures of docs/console.md: ``python -m tests.e2e.console.pictures docs/pictures``."""

import argparse
import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser

from tests.e2e.console.scenes import SESSION, Traffic, cluster, converse, spoil
from tests.fakes.chromium import Onlooker, chromium, onlooker
from tests.fakes.console import FakeConsole

_WARM_UP_S = 60.0
"""Until the last minute of turns is full."""


async def main(folder: Path) -> None:
    """Writes all pictures into a folder that is there."""
    async with chromium() as browser:
        await _empty(browser, folder)
        await _small(browser, folder)
        await _large(browser, folder)


async def _empty(browser: Browser, folder: Path) -> None:
    async with FakeConsole().serving() as url, onlooker(browser, url) as window:
        await window.open()
        await window.reads("#welcome", "No nodes yet")
        await _take(window, folder / "console-empty.webp")


async def _small(browser: Browser, folder: Path) -> None:
    console = cluster(4)
    traffic = Traffic(console, 4)
    traffic.past()
    async with console.serving() as url, traffic.flowing(), onlooker(browser, url) as light:
        await light.open()
        async with onlooker(browser, url, "dark") as dark:
            await dark.open()
            await asyncio.sleep(_WARM_UP_S)
            for scheme, window in (("light", light), ("dark", dark)):
                await window.page.click("#misses button:has-text('not_found')")
                await _take(window, folder / f"console-overview-{scheme}.webp")
        await light.page.click("#tab-turns")
        await light.page.click("#turns-pause")
        await light.page.locator("#turns-table tbody tr", has_text="lookup_timeout").first.click()
        await _take(light, folder / "console-turns-light.webp")
    converse(console)
    async with console.serving() as url, onlooker(browser, url, "dark") as window:
        await window.open("conversation")
        await window.page.fill("#conversation-id", SESSION)
        await window.page.press("#conversation-id", "Enter")
        await window.reads("#conversation-answer", "tokens")
        await _take(window, folder / "console-conversation-dark.webp")


async def _large(browser: Browser, folder: Path) -> None:
    console = cluster(100)
    spoil(console)
    traffic = Traffic(console, 100)
    traffic.past()
    schemes: Sequence[tuple[Literal["light", "dark"], str]] = (("light", "nodes"), ("dark", "overview"))
    for scheme, section in schemes:
        async with console.serving() as url, onlooker(browser, url, scheme) as window:
            await window.open(section)
            traffic.load()
            await window.reads("#facts", "197 of 200 nodes ready")
            await _take(window, folder / f"console-200-{section}-{scheme}.webp")


async def _take(window: Onlooker, path: Path) -> None:
    await asyncio.sleep(2)
    session = await window.page.context.new_cdp_session(window.page)
    taken = await session.send("Page.captureScreenshot", {"format": "webp", "quality": 85})
    await asyncio.to_thread(path.write_bytes, base64.b64decode(taken["data"]))
    assert window.faults == []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Takes the pictures of docs/console.md")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(folder))
