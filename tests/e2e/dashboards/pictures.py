"""Draws the pictures of docs/dashboards.md: ``python -m tests.e2e.dashboards.pictures docs/pictures``.

They show what the dashboards' own queries answer, in the dashboards' arrangement. Grafana has no part in them.
"""

import argparse
import asyncio
import base64
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.dashboards import DASHBOARDS, Panel, dashboard, panels
from tests.e2e.dashboards.test_panels import shown
from tests.e2e.dashboards.watched import Watched, filled_in, watched
from tests.fakes.chromium import chromium

_PLAY_S = 150
_SPAN_S = 120
_WIDTH, _CELL, _ROW = 1440, 60, 26
"""Pixels: of a picture, and of Grafana's grid of 24 columns."""
_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#b07aa1",
    "#e15759",
    "#76b7b2",
    "#9c755f",
    "#edc948",
    "#ff9da7",
    "#79706e",
)
_STYLE = """
body { margin: 0; font: 11px sans-serif; color: #24292f; background: #fff }
div.panel { position: absolute; box-sizing: border-box; border: 1px solid #d0d7de; border-radius: 3px; padding: 5px 7px;
  overflow: hidden; background: #fff; margin: 2px; display: flex; flex-direction: column }
b { font-size: 12px } h2 { position: absolute; margin: 4px 6px; font-size: 14px }
big { font-size: 26px; margin: auto } svg { flex: 1; min-height: 0; border-bottom: 1px solid #d0d7de }
small { color: #57606a; white-space: nowrap } i { display: inline-block; width: 9px; height: 9px; margin: 0 3px 0 8px }
"""

Line = tuple[str, list[tuple[float, float]]]
"""What a series is called, and its points: seconds and value."""


def lines_of(running: Watched, panel: Panel, now: float) -> list[Line]:
    """Returns what a panel shows of the last minutes."""
    found: list[Line] = []
    for query in panel.queries:
        span = {"start": now - _SPAN_S, "end": now, "step": 2}
        for series in running.prometheus.get("query_range", query=filled_in(query.expr), **span)["result"]:
            points = [(when, float(value)) for when, value in series["values"] if math.isfinite(float(value))]
            found.append((_name(query.legend, series["metric"]), points))
    return [line for line in found if line[1]]


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def readable(value: float, unit: str) -> str:
    """Returns a value as Grafana would write it, about."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return (
            f"{value * 1000:.3g} ms" if value < 1 else f"{value / 86400:.3g} d" if value > 86400 else f"{value:.3g} s"
        )
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB" if value >= 2**20 else f"{value / 1024:.3g} KiB"
    return (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}{unit.removeprefix('suffix:') if 'suffix:' in unit else ''}"
    )


def drawn(panel: Panel, lines: Sequence[Line], now: float) -> str:
    """Returns the inside of a panel."""
    title = f"<b>{escape(panel.title)}</b>"
    if not shown(panel):
        return f"{title}<small>real engines only</small>"
    if panel.model["type"] == "stat":
        return f"{title}<big>{escape(readable(lines[0][1][-1][1], panel.unit))}</big>"
    top = max((value for _, points in lines for _, value in points), default=0) or 1
    curves = "".join(_curve(points, now, top, _COLOURS[at % len(_COLOURS)]) for at, (_, points) in enumerate(lines))
    ranked = sorted(enumerate(lines), key=lambda one: -one[1][1][-1][1])
    names = "".join(
        f'<i style="background:{_COLOURS[at % len(_COLOURS)]}"></i>{escape(name)} {readable(points[-1][1], panel.unit)}'
        for at, (name, points) in ranked[:6]
    )
    graph = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{curves}</svg>'
    return f"{title}<small>{readable(top, panel.unit)}</small>{graph}<small>{names}</small>"


def _curve(points: Sequence[tuple[float, float]], now: float, top: float, colour: str) -> str:
    places = " ".join(f"{100 - (now - when) / _SPAN_S * 100:.2f},{98 - value / top * 95:.2f}" for when, value in points)
    style = f'fill="none" stroke="{colour}" stroke-width="1.5" vector-effect="non-scaling-stroke"'
    return f'<polyline points="{places}" {style}/>'


def page_of(name: str, running: Watched, now: float) -> tuple[str, int]:
    """Returns a dashboard as HTML, and its height in pixels."""
    models: Sequence[Mapping[str, Any]] = dashboard(name)["panels"]
    inside = {panel.model["id"]: drawn(panel, lines_of(running, panel, now), now) for panel in panels(name)}
    parts, height = [], 0
    for model in models:
        place = model["gridPos"]
        box = {
            "left": place["x"] * _CELL,
            "top": place["y"] * _ROW,
            "width": place["w"] * _CELL,
            "height": place["h"] * _ROW,
        }
        style = ";".join(f"{key}:{value - 4 * (key in ('width', 'height'))}px" for key, value in box.items())
        text = inside.get(model["id"])
        parts.append(
            f'<div class="panel" style="{style}">{text}</div>' if text else f'<h2 style="{style}">{model["title"]}</h2>'
        )
        height = max(height, box["top"] + box["height"])
    return f"<style>{_STYLE}</style>{''.join(parts)}", height


async def _take(pages: Mapping[str, tuple[str, int]], folder: Path) -> None:
    async with chromium() as browser:
        for name, (html, height) in pages.items():
            page = await browser.new_page(viewport={"width": _WIDTH, "height": height + 4})
            await page.set_content(html)
            session = await page.context.new_cdp_session(page)
            taken = await session.send("Page.captureScreenshot", {"format": "webp", "quality": 85})
            (folder / f"dashboard-{name}.webp").write_bytes(base64.b64decode(taken["data"]))


def main(folder: Path) -> None:
    """Plays for some minutes, then writes a picture of each dashboard into a folder that is there."""
    with tempfile.TemporaryDirectory() as state, watched(Path(state)) as running:
        until = time.monotonic() + _PLAY_S
        running.play()
        running.fail()
        while time.monotonic() < until:
            running.play()
        now = time.time()
        pages = {name: page_of(name, running, now) for name in DASHBOARDS}
    asyncio.run(_take(pages, folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the pictures of docs/dashboards.md")
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
