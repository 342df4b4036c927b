"""The HTTP API through a real Envoy that makes gRPC of it."""

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import break_after, event_of, hang
from tests.fakes.envoy_process import transcoder
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, Got, RouterStack, chat_body, router_stack

LIMIT_BYTES = 7_000_000


@dataclass
class Front:
    """A stack and a transcoder before it."""

    stack: RouterStack
    url: str

    async def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Got:
        """Sends a request, with JSON unless it is bytes; reads the whole answer."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        data = None if raw is None else io.BytesIO(raw)
        named = {"content-type": "application/json", **(headers or {})}
        async with self.stack.client.request(method, f"{self.url}{path}", data=data, headers=named) as response:
            return Got(response.status, response.headers, await response.read())

    async def chat(self, *contents: str, headers: dict[str, str] | None = None, **fields: Any) -> Got:
        """Sends a chat turn."""
        return await self.ask("POST", CHAT, chat_body(*contents, **fields), headers)

    @property
    def idle(self) -> bool:
        """Whether nothing counts as running."""
        router = self.stack.router
        return not (router.admission.turn_count or router.admission.held_bytes or router.routing.live.load.total)


@asynccontextmanager
async def front(folder: Path, change: Callable[[str], str] = lambda text: text, **options: Any) -> AsyncIterator[Front]:
    """Starts a stack and a transcoder; at the end nothing may count as running."""
    async with (
        router_stack(body_limit=LIMIT_BYTES, **options) as stack,
        transcoder(folder, grpc_port=stack.router.grpc_port, change=change) as url,
    ):
        found = Front(stack, url)
        yield found
        await eventually(lambda: found.idle)


def told(got: Got) -> tuple[int, str, str]:
    """Returns status, reason and message of an error."""
    status = json.loads(got.body)
    (info,) = [detail for detail in status["details"] if detail["@type"].endswith("google.rpc.ErrorInfo")]
    assert info["domain"] == "backhaul"
    return got.status, info["reason"], status["message"]


async def test_answers_are_those_of_the_http_api_byte_for_byte(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        for stream in (True, False):
            direct = await found.stack.chat("hi", stream=stream)
            got = await found.chat("hi", stream=stream)
            assert (got.status, got.body) == (200, direct.body)
            assert got.headers["content-type"] == direct.headers["content-type"]
            ours = [name for name in direct.headers if name.startswith("x-backhaul-")]
            assert [got.headers[name] for name in ours] == [direct.headers[name] for name in ours]
        body = {"model": "tiny", "prompt": "once"}
        completion = await found.ask("POST", "/v1/completions?x=1", body)
        large = await found.chat("x" * 6_000_000)
        models = await found.ask("GET", "/v1/models")
        ended = await found.ask("DELETE", "/v1/conversations/a%2Fb?model=tiny")

    assert (completion.status, json.loads(completion.body)["choices"][0]["text"]) == (200, "Hello there")
    assert large.status == 200
    assert [entry["id"] for entry in json.loads(models.body)["data"]] == ["tiny"]
    document = json.loads(ended.body)
    assert (ended.status, document["id"], document["object"]) == (200, "a/b", "conversation.deleted")


async def test_events_come_one_by_one_and_who_leaves_ends_the_leg(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.decode.chunk_gate = asyncio.Event()
        body = json.dumps(chat_body("hi", stream=True)).encode()
        headers = {"content-type": "application/json"}
        async with found.stack.client.post(f"{found.url}{CHAT}", data=body, headers=headers) as response:
            first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 10)
        response.close()

        assert first == event_of(found.stack.decode.text[0])
        await asyncio.wait_for(found.stack.decode.legs[0].closed_early.wait(), 5)


async def test_a_stream_that_breaks_ends_with_an_error_event(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.decode.then(break_after([event_of("Hel")]))
        got = await found.chat("hi", stream=True)

    *events, last = got.body.strip().split(b"\n\n")
    assert (got.status, len(events)) == (200, 1)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"


async def test_headers_are_heeded(tmp_path: Path) -> None:
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(f'[tenants.north]\nkey_sha256 = ["{hashlib.sha256(b"k").hexdigest()}"]')
    key.write_text("0123456789abcdef")
    async with front(tmp_path, tenants_file=str(tenants), cluster_key_file=str(key)) as found:
        refused = await found.chat("hi", headers={"authorization": "Bearer other"})
        named = {"authorization": "Bearer k", "x-session-id": "s"}
        got = await found.chat("hi", headers=named)
        without = await found.chat("hi", headers={**named, "x-backhaul-reuse": "off"})
        found.stack.prefill.then(hang())
        late = await found.chat("hi", headers={"authorization": "Bearer k", "grpc-timeout": "300m"})

    assert told(refused)[:2] == (401, "INVALID_API_KEY")
    assert (got.status, without.status, late.status) == (200, 200, 504)
    assert len(found.stack.directory.lookups) == 1


async def test_errors_are_statuses_with_their_reasons(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        answers = [
            await found.ask("POST", CHAT, b"{"),
            await found.ask("POST", CHAT, chat_body("hi"), {"content-type": "text/plain"}),
            await found.chat("hi", model="other"),
            await found.chat("x" * 7_000_000),
        ]
        await found.stack.lose(found.stack.decode)
        none = await found.chat("hi")
        unknown = await found.ask("GET", "/v1/nothing")

    assert [told(got)[:2] for got in answers] == [
        (400, "INVALID_REQUEST"),
        (400, "UNSUPPORTED_MEDIA_TYPE"),
        (404, "MODEL_NOT_FOUND"),
        (429, "BODY_LIMIT"),
    ]
    assert (told(none), none.headers["retry-after"]) == ((503, "NO_CAPACITY", "no decode node is ready"), "1")
    assert {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1s"} in json.loads(none.body)["details"]
    assert unknown.status == 404


def messages_as(options: str) -> Callable[[str], str]:
    """Has the streams of InferenceService transcoded as well, and printed so."""
    services = "services: [backhaul.router.v1.HttpService"
    more = ", backhaul.router.v1.InferenceService]\n              auto_mapping: true\n              print_options: "
    return lambda config: config.replace(f"{services}]", f"{services}{more}{options}")


@pytest.mark.parametrize(
    ("options", "kind", "begins", "between", "ends"),
    [
        ("{}", "application/json", b"[", b",", b"]"),
        ("{stream_newline_delimited: true}", "application/json", b"", b"\n", b"\n"),
        ("{stream_sse_style_delimited: true}", "text/event-stream", b"data: ", b"\n\ndata: ", b"\n\n"),
    ],
    ids=["by default", "lines", "events"],
)
async def test_streams_of_messages_look_as_the_print_options_say(
    tmp_path: Path, options: str, kind: str, begins: bytes, between: bytes, ends: bytes
) -> None:
    async with front(tmp_path, messages_as(options)) as found:
        body = base64.b64encode(json.dumps(chat_body("hi", stream=True)).encode()).decode()
        got = await found.ask("POST", "/backhaul.router.v1.InferenceService/ChatCompletions", {"body": body})

    assert got.headers["content-type"] == kind
    assert got.body.startswith(begins)
    started, _, rest = got.body.removeprefix(begins).partition(between + b'{"chunk":')
    assert json.loads(started)["started"]["route"] == "cold"
    assert rest.endswith(b'"}' + ends)
