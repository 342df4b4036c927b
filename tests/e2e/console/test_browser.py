"""The console in a real Chromium, of a laptop's size, that reaches nothing but the console."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from backhaul_router.core.console.operators import parse_operators
from backhaul_router.keys import line_for, new_key
from tests.e2e.console.scenes import LOCALHOST, SESSION, TICK_S, Traffic, cluster, converse, spoil
from tests.fakes.chromium import Onlooker, chromium, onlooker
from tests.fakes.console import FakeConsole, cold, node, warm
from tests.fakes.etcd_process import free_port
from tests.fakes.router_stack import router_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

NODES = "#nodes-table tbody tr"
TURNS = "#turns-table tbody tr"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@asynccontextmanager
async def watched(browser: Browser, console: FakeConsole, **options: Any) -> AsyncIterator[Onlooker]:
    """Opens a console's page. Leaving fails the test when a script failed, or anything was asked of other hosts."""
    async with console.serving(**options) as url, onlooker(browser, url) as window:
        await window.open()
        yield window
        assert window.faults == []


async def test_a_page_without_nodes_says_how_to_get_some(browser: Browser) -> None:
    async with watched(browser, FakeConsole(tick_s=TICK_S)) as window:
        await window.reads("#welcome", "No nodes yet")
        await window.reads("#welcome", "backhaul-node-agent")
        await window.reads("#problems", "the registry lists none")
        await window.page.click("#tab-nodes")
        await window.reads("#nodes-empty", "No nodes are known")
        await window.page.click("#tab-turns")
        await window.reads("#turns-empty", "No turn has ended")


async def test_a_registry_that_does_not_answer_is_told_from_one_without_nodes(browser: Browser) -> None:
    console = FakeConsole(tick_s=TICK_S)
    console.finder.follows = False
    async with watched(browser, console) as window:
        await window.reads("#welcome", "No registry answers")
        console.finder.follows = True
        await window.reads("#welcome", "No nodes yet")


async def test_turns_appear_as_they_end(browser: Browser) -> None:
    console = cluster(2)
    async with watched(browser, console) as window:
        await window.reads("#welcome", "No turn yet")
        await window.page.click("#tab-turns")
        console.play(cold("first_turn"))
        console.play(warm(), holder="decode-2")
        await window.reads(f"{TURNS}:nth-child(1)", "warm")
        await window.reads(f"{TURNS}:nth-child(2)", "first_turn")
        assert "decode-2 ⇢ prefill-1 → decode-1" in await window.text(f"{TURNS}:nth-child(1)")
        await window.page.click("#tab-overview")
        await window.until("document.querySelector('#welcome').hidden")


async def test_the_last_half_hour_is_drawn_and_summed_up(browser: Browser) -> None:
    console = cluster(3)
    Traffic(console, 3).past(30)
    async with watched(browser, console) as window:
        await window.reads("#tiles .tile:has-text('Hit rate') b", "%")
        await window.reads("#tiles .tile:has-text('Retained') b", "tokens")
        await window.until("document.querySelector('#retained-chart path').getAttribute('d').length > 100")
        await window.until("document.querySelector('#retained-chart path[fill=none]').getAttribute('d').length > 100")
        drawn = "[...document.querySelectorAll('#turns-chart path')].map((path) => path.getAttribute('d').length > 100)"
        # Three routes, and the hit rate.
        assert await window.page.evaluate(drawn) == [True] * 4


async def test_a_turn_that_ends_is_a_dot_in_the_lane_of_its_route(browser: Browser) -> None:
    console = cluster(2)
    async with watched(browser, console) as window:
        await window.reads("#link", "live")
        await window.until(f"({_PAINTED})[0] > 0")
        empty, *others = await window.page.evaluate(_PAINTED)
        assert others == [empty, empty]
        for _ in range(5):
            console.play(warm())
        await window.until(f"({_PAINTED})[1] > {empty} + 20")
        now = await window.page.evaluate(_PAINTED)
        assert [now[0], now[2]] == [empty, empty]


_PAINTED = """(() => {
  const canvas = document.querySelector("#river"), ratio = canvas.width / canvas.clientWidth;
  const left = Math.round(64 * ratio), lane = Math.floor((canvas.height - 16 * ratio) / 3);
  return [0, 1, 2].map((index) => {
    const width = canvas.width - left - Math.round(56 * ratio);
    const { data } = canvas.getContext("2d").getImageData(left, lane * index, width, lane);
    return data.filter((value, place) => place % 4 === 3 && value > 0).length;
  });
})()"""
"""Pixels that are painted in each lane of the river: cold, warm, append."""


async def test_a_cold_turn_says_why_and_what_to_do(browser: Browser) -> None:
    console = cluster(2)
    console.play(cold("lookup_timeout"))
    async with watched(browser, console) as window:
        await window.page.click("#misses button")
        await window.reads("#misses .explained", "--lookup-budget-s")
        await window.page.click("#tab-turns")
        await window.page.click(TURNS)
        await window.reads("#turn-detail", "Registry or owner did not answer within the lookup budget.")
        await window.reads("#turn-detail", "--lookup-budget-s")


async def test_what_is_wrong_with_nodes_is_said_first_and_leads_to_them(browser: Browser) -> None:
    console = cluster(10)
    spoil(console)
    async with watched(browser, console) as window:
        await window.reads("#problems .error", "connection refused")
        await window.reads("#problems .error", "set VLLM_NIXL_SIDE_CHANNEL_HOST")
        await window.page.click("#problems button:has-text('prefill-5')")
        await window.reads("#node-detail", LOCALHOST)
        await window.reads(f"{NODES}[aria-selected=true]", "prefill-5")


async def test_a_conversation_is_shown_by_its_id_which_stays_out_of_addresses(browser: Browser) -> None:
    console = cluster(2)
    converse(console)
    async with watched(browser, console) as window:
        await window.page.click("#tab-conversation")
        await window.page.fill("#conversation-id", SESSION)
        await window.page.press("#conversation-id", "Enter")
        await window.reads("#conversation-answer", "3,712 tokens")
        await window.reads("#conversation-answer", "4 turns on this router")
        assert all(SESSION not in address for address in window.addresses)
        await window.page.fill("#conversation-id", "unknown")
        await window.page.press("#conversation-id", "Enter")
        await window.reads("#conversation-answer", "none of them is of this conversation")


async def test_a_turn_leads_to_the_history_of_its_conversation(browser: Browser) -> None:
    console = cluster(2)
    converse(console)
    async with watched(browser, console) as window:
        await window.page.click("#tab-turns")
        await window.page.click(f"{TURNS}:nth-child(2)")
        await window.reads("#turn-detail", "History: 4 turns")
        await window.reads("#turn-detail", "held")


async def test_two_hundred_nodes_stay_quick_and_only_rows_that_change_are_touched(browser: Browser) -> None:
    console = cluster(100)
    Traffic(console, 100).past(5)
    async with watched(browser, console) as window:
        await window.page.click("#tab-nodes")
        await window.until(f"document.querySelectorAll('{NODES}').length === 200")
        await window.page.evaluate(f"window.before = [...document.querySelectorAll('{NODES}')]")
        console.load("decode-50", blocks=9999)
        await window.reads(f"{NODES}[data-id=decode-50]", "9,999 / 10 k")
        same = "window.before.every((row, index) => row === document.querySelectorAll('{}')[index])"
        assert await window.page.evaluate(same.format(NODES))
        await window.page.fill("#nodes-filter", "decode-5")
        await window.reads("#nodes-note", "11 of 200 nodes")
        began = time.monotonic()
        await window.page.click("#nodes-table th:has-text('Retained') button")
        await window.page.click("#nodes-table th:has-text('Node') button")
        # On an idle machine some 20 ms.
        assert time.monotonic() - began < 5


async def test_a_node_that_leaves_and_one_that_comes_change_the_list(browser: Browser) -> None:
    console = FakeConsole(node("d1"), node("d2"), tick_s=TICK_S)
    async with watched(browser, console) as window:
        await window.page.click("#tab-nodes")
        await window.until(f"document.querySelectorAll('{NODES}').length === 2")
        console.table.change([node("d10"), node("d3")], ["d1"])
        console.table.drop_orphan("d1")
        order = f"[...document.querySelectorAll('{NODES}')].map((row) => row.dataset.id).join() === 'd2,d3,d10'"
        await window.until(order)


async def test_what_the_page_keeps_of_many_turns_is_bounded(browser: Browser) -> None:
    console = cluster(3)
    traffic = Traffic(console, 3)
    async with watched(browser, console) as window:
        await window.page.click("#tab-turns")
        for _ in range(6):
            for _ in range(200):
                traffic.turn()
            await asyncio.sleep(TICK_S)
        await window.reads("#turns-note", "not shown")
        assert await window.page.locator(TURNS).count() <= 200


async def test_it_is_used_by_keys_alone(browser: Browser) -> None:
    console = cluster(3)
    console.play(warm())
    async with watched(browser, console) as window:
        page = window.page
        await window.reads("#link", "live")
        await page.keyboard.press("2")
        await window.reads("[role=tab][aria-selected=true]", "Turns")
        await page.keyboard.press("ArrowRight")
        await window.reads("[role=tab][aria-selected=true]", "Nodes")
        await page.keyboard.press("/")
        await page.keyboard.type("decode")
        await window.reads("#nodes-note", "3 of 6 nodes")
        await page.keyboard.press("Escape")
        await page.locator(f"{NODES}:not([hidden])").first.focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        await window.reads("#node-detail h2", "decode-2")
        await page.keyboard.press("Escape")
        await window.until("document.querySelector('#node-detail').hidden")


async def test_text_that_looks_like_markup_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\">"
    console = FakeConsole(replace(node("d1", reuse=False, reuse_problem=evil), models=frozenset({evil})), tick_s=TICK_S)
    console.play(cold(evil), model=evil)
    async with watched(browser, console) as window:
        await window.reads("#problems", evil)
        await window.page.click("#tab-nodes")
        await window.reads(NODES, evil)
        await window.page.click(NODES)
        await window.page.click("#tab-turns")
        await window.reads(TURNS, evil)
        await window.page.click(TURNS)
        assert await window.page.title() == "Backhaul console"
        assert await window.page.locator("img").count() == 1


async def test_a_key_is_asked_for_kept_in_the_tab_and_in_no_address(browser: Browser) -> None:
    key = new_key()
    console = cluster(2)
    async with console.serving(operators=parse_operators(line_for(key))) as url, onlooker(browser, url) as window:
        await window.open()
        await window.page.fill("#login-key", "another")
        await window.page.press("#login-key", "Enter")
        await window.reads("#login-error", "unknown operator key")
        await window.page.fill("#login-key", key)
        await window.page.press("#login-key", "Enter")
        await window.reads("#facts", "4 of 4 nodes ready")
        await window.page.reload()
        await window.reads("#facts", "4 of 4 nodes ready")
        assert all(key not in address for address in window.addresses)
        assert "owned" not in str(window.faults)
        assert all("401" in fault for fault in window.faults)


async def test_a_router_that_is_away_is_said_to_be_and_comes_back(browser: Browser) -> None:
    console, address = cluster(2), f"127.0.0.1:{free_port()}"
    async with onlooker(browser, f"http://{address}/console/") as window:
        async with console.serving(address=address):
            await window.open()
            await window.reads("#link", "live")
        await window.reads("#link", "no connection")
        async with console.serving(address=address):
            await window.reads("#link", "live")


async def test_it_follows_the_systems_theme_until_one_is_chosen(browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with watched(browser, cluster(1)) as window:
        light = await window.page.evaluate(background)
        await window.page.emulate_media(color_scheme="dark")
        dark = await window.page.evaluate(background)
        assert light != dark
        await window.page.select_option("#theme", "light")
        assert await window.page.evaluate(background) == light
        await window.page.reload()
        assert await window.page.evaluate(background) == light


async def test_it_fits_a_laptops_screen(browser: Browser) -> None:
    console = cluster(3)
    Traffic(console, 3).past(30)
    async with watched(browser, console) as window:
        await window.reads("#link", "live")
        for section in ("overview", "turns", "nodes", "conversation"):
            await window.page.click(f"#tab-{section}")
            sizes = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            assert await window.page.evaluate(sizes) == [1280, 720]
            shown = f"document.querySelector('#{section}')"
            assert await window.page.evaluate(f"{shown}.scrollHeight <= {shown}.clientHeight"), section


async def test_a_routers_own_turns_are_shown(browser: Browser) -> None:
    async with router_stack(listen_console="127.0.0.1:0") as stack:
        url = f"http://127.0.0.1:{stack.router.console_port}/console/"
        async with onlooker(browser, url) as window:
            await window.open("turns")
            assert (await stack.chat("hi")).status == 200
            await window.reads(TURNS, f"prefill-{stack.prefill.port} → decode-{stack.decode.port}")
            assert window.faults == []
