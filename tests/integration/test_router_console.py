"""The console's listener: who is let in, what it answers, and what a router's own turns look like there."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs
from yarl import URL

from backhaul_common.tls import CallerContext
from backhaul_local.certificates import Authority
from backhaul_router.console.service import MAX_ONLOOKERS
from backhaul_router.core.console.operators import parse_operators
from backhaul_router.core.nodes import Role
from backhaul_router.keys import line_for, new_key
from tests.fakes.certificates import identity
from tests.fakes.complaints import complaints
from tests.fakes.console import FakeConsole, node, warm
from tests.fakes.eventually import eventually
from tests.fakes.leaks import no_tasks_left
from tests.fakes.router_stack import RouterStack, router_stack
from tests.integration.test_router_turns import label_key

KEY = new_key()
SECRET = "the launch code is 7355608"
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def console(*, key: str = "", **options: Any) -> AsyncIterator[tuple[FakeConsole, str, aiohttp.ClientSession]]:
    """Serves a console of two nodes; yields it, its address and a client that brings no key."""
    shown = FakeConsole(node("p1", Role.PREFILL), node("d1"))
    operators = parse_operators(line_for(key)) if key else None
    async with no_tasks_left(), shown.serving(operators=operators, **options) as url, aiohttp.ClientSession() as client:
        yield shown, url, client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """Yields names and documents of a stream of events."""
    name = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        if line.startswith(b"data: "):
            yield name, json.loads(line[6:])


@pytest.mark.parametrize("path", ["api/state", "api/events", "api/turns/1", "api/nothing"])
async def test_data_is_for_holders_of_a_key_alone(path: str) -> None:
    async with console(key=KEY) as (_, url, client):
        for headers in ({}, bearer("other"), {"authorization": KEY}):
            async with client.get(url + path, headers=headers) as response:
                assert (response.status, "key" in (await response.text())) == (401, True)
        async with client.post(f"{url}api/conversation", json={"id": "x"}) as response:
            assert response.status == 401


async def test_a_key_opens_the_data() -> None:
    async with console(key=KEY) as (_, url, client), client.get(f"{url}api/state", headers=bearer(KEY)) as response:
        assert response.status == 200
        assert [row["id"] for row in (await response.json())["changes"]["nodes"]] == ["p1", "d1"]


async def test_the_page_needs_no_key_and_holds_nothing() -> None:
    async with console(key=KEY) as (_, url, client):
        for name in ("", "index.html", "app.js", "style.css", "icon.svg"):
            async with client.get(url + name) as response:
                assert response.status == 200
                assert "d1:7201" not in await response.text()
        async with client.get(url.removesuffix("console/")) as response:
            assert str(response.url) == url


@pytest.mark.parametrize("path", ["", "app.js", "api/state", "nothing", "..%2fservice.py"])
async def test_every_answer_tells_browsers_to_load_nothing_from_elsewhere(path: str) -> None:
    async with console() as (_, url, client), client.get(url + path) as response:
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_files_beside_the_page_are_not_served() -> None:
    async with console() as (_, url, client):
        for path in ("service.py", "../service.py", "..%2fservice.py", "%2fetc%2fpasswd", "page/app.js"):
            async with client.get(URL(url + path, encoded=True)) as response:
                assert response.status == 404


async def test_without_keys_pages_of_other_sites_cannot_read_along() -> None:
    async with console() as (_, url, client):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            async with client.get(f"{url}api/state", headers={"host": host}) as response:
                assert response.status == 403
        for host in ("localhost:8090", "127.0.0.1", "[::1]:8090", "[::1]"):
            async with client.get(f"{url}api/state", headers={"host": host}) as response:
                assert response.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with console() as (_, url, client):
        for path in ("", "api/state", "api/events", "api/turns/1"):
            async with client.request(method, url + path) as response:
                assert response.status == 405


async def test_a_stream_begins_with_everything_and_goes_on_with_what_changes() -> None:
    async with console() as (shown, url, client), client.get(f"{url}api/events") as response:
        stream = events(response)
        name, state = await anext(stream)
        assert (name, len(state["changes"]["nodes"])) == ("state", 2)
        number = shown.play(warm())
        shown.load("d1", blocks=10)
        told: list[int] = []
        while number not in told:
            name, changes = await anext(stream)
            told += [turn["number"] for turn in changes["turns"]]
        assert (name, changes["tally"]["routes"]) == ("changes", {"warm": 1})


async def test_a_browser_that_leaves_as_the_console_does_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with no_tasks_left(), aiohttp.ClientSession() as client:
        async with FakeConsole(node("d1")).serving() as url:
            response = await client.get(f"{url}api/events")
            await anext(events(response))
            assert response.connection is not None
            assert response.connection.transport is not None
            asyncio.get_running_loop().call_later(0.03, response.connection.transport.abort)
        await asyncio.sleep(0.2)
        assert complaints(caplog) == []
        response.close()


async def test_onlookers_are_bounded_and_their_places_are_free_again() -> None:
    async with console() as (_, url, client):
        streams = [await client.get(f"{url}api/events") for _ in range(MAX_ONLOOKERS)]
        async with client.get(f"{url}api/events") as response:
            assert response.status == 429
        for stream in streams:
            stream.close()

        async def free() -> bool:
            async with client.get(f"{url}api/events") as response:
                return response.status == 200

        await eventually(free)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"id": 7}', 400),
        (b'{"id": ""}', 400),
        (b'{"id": "x", "odd": 1}', 400),
        (b"[" * 5000, 400),
        (b'{"id": "' + b"x" * 9000 + b'"}', 413),
    ],
)
async def test_a_question_that_is_none_is_refused_without_repeating_it(body: bytes, status: int) -> None:
    async with console() as (_, url, client):
        async with client.post(f"{url}api/conversation", data=body, headers=JSON) as response:
            assert response.status == status
            assert "xxx" not in await response.text()
        async with client.post(f"{url}api/conversation", data=b"{}") as response:
            assert response.status == 415


async def test_it_speaks_tls_where_the_listener_does(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with console(tls=identity(authority.issue("router"))) as (_, url, client):
        assert url.startswith("https://")
        trusting = CallerContext(identity(None, authority)).current()
        async with client.get(f"{url}api/state", ssl=trusting) as response:
            assert response.status == 200


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(listen_console="127.0.0.1:0") as stack:
        yield stack


async def ask(stack: RouterStack, path: str, body: Any = None) -> Any:
    """Asks a router's console."""
    url = f"http://127.0.0.1:{stack.router.console_port}/console/api/{path}"
    method: Callable[..., Any] = stack.client.get if body is None else stack.client.post
    async with method(url, **({} if body is None else {"json": body})) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def turns(stack: RouterStack, count: int) -> list[dict[str, Any]]:
    """Returns the turns that a router tells of, once there are so many."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        found[:] = (await ask(stack, "state"))["changes"]["turns"]
        return len(found) == count

    await eventually(there)
    return found


async def test_a_router_has_no_console_unless_it_is_asked_for() -> None:
    async with router_stack() as stack:
        assert stack.router.console_port == 0
        async with stack.client.get(f"{stack.url}/console/") as response:
            assert response.status == 404


async def test_a_warm_turn_and_a_cold_one_are_shown_with_nodes_and_reason(stack: RouterStack) -> None:
    await stack.chat(SECRET)
    stack.hold(tokens=128)
    stack.publish(label_key(SECRET))
    await stack.chat(SECRET, "a", "b", headers={"x-session-id": "session-1"})
    first, second = await turns(stack, 2)
    assert (first["route"], first["miss"], first["result"]) == ("cold", "first_turn", "ok")
    prefill, decode = f"prefill-{stack.prefill.port}", f"decode-{stack.decode.port}"
    assert (second["route"], second["prefill"], second["decode"]) == ("warm", prefill, decode)
    assert second["holder"] == decode
    state = await ask(stack, "state")
    assert state["changes"]["tally"]["routes"] == {"cold": 1, "warm": 1}
    assert SECRET not in json.dumps(state)
    assert "session-1" not in json.dumps(state)


async def test_a_conversation_is_found_by_its_id_and_by_any_of_its_turns(stack: RouterStack) -> None:
    await stack.chat(SECRET, headers={"x-session-id": "session-1"})
    await stack.chat(SECRET, "a", "b", headers={"x-session-id": "session-1"})
    await stack.chat("another")
    first, second, _ = await turns(stack, 3)
    by_id = await ask(stack, "conversation", {"id": "session-1"})
    by_turn = await ask(stack, f"turns/{first['number']}")
    numbers = [first["number"], second["number"]]
    assert [turn["number"] for turn in by_id["turns"]] == [turn["number"] for turn in by_turn["turns"]] == numbers
    assert "session-1" not in json.dumps(by_id)


async def test_a_turn_that_fails_is_shown_with_the_nodes_that_failed_it(stack: RouterStack) -> None:
    await stack.decode.stop()
    with capture_logs() as logs:
        answer = await stack.chat("hi")
    assert answer.status >= 500
    (turn,) = await turns(stack, 1)
    assert (turn["result"], turn["tried"]) == (f"error_{answer.status}", [f"decode-{stack.decode.port}"])
    assert [line["result"] for line in logs if line["event"] == "turn"] == [turn["result"]]


async def test_a_running_turn_counts_as_such_and_is_remembered_once_it_is_over(stack: RouterStack) -> None:
    gate = stack.decode.chunk_gate = asyncio.Event()
    running = asyncio.create_task(stack.chat("hi", stream=True))
    await eventually(lambda: ask_running(stack))
    gate.set()
    await running
    assert (await turns(stack, 1))[0]["result"] == "ok"


async def ask_running(stack: RouterStack) -> bool:
    return bool((await ask(stack, "state"))["changes"]["running"] == 1)
