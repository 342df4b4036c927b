"""A router as the endpoint picker of a real Envoy, with engines that record what they are sent."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backhaul_router.core.health.breakers import BreakerState
from tests.fakes.engine import FakeEngine, bare_500, break_after, event_of, hang, late, refuse
from tests.fakes.envoy_process import both_in_pieces, envoy, in_pieces, limited_to, with_trailers
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, Got, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key

Change = Callable[[str], str]

WAYS = [
    pytest.param(lambda config: config, id="buffered"),
    pytest.param(in_pieces, id="in-pieces"),
    pytest.param(both_in_pieces, id="both-in-pieces"),
]
"""How bodies are sent."""

REQUESTS = WAYS[:2]
"""How those of requests are."""

JSON = {"content-type": "application/json"}


@dataclass
class Front:
    """A stack and Envoy before it."""

    stack: RouterStack
    url: str

    async def chat(self, *contents: str, headers: dict[str, str] | None = None, **fields: Any) -> Got:
        """Sends a chat turn."""
        return await self.send(io.BytesIO(json.dumps(chat_body(*contents, **fields)).encode()), headers=headers)

    async def send(self, data: Any, *, headers: dict[str, str] | None = None, path: str = CHAT) -> Got:
        """Sends a body, in chunks when it is an iterator; reads the whole answer."""
        asked = self.stack.client.post(f"{self.url}{path}", data=data, headers={**JSON, **(headers or {})})
        async with asked as response:
            return Got(response.status, response.headers, await response.read())

    @property
    def state(self) -> BreakerState:
        """How the decode engine is used."""
        node = self.stack.router.table.get(node_of(self.stack.decode))
        assert node is not None
        return self.stack.router.routing.live.breakers.state(node)

    @property
    def idle(self) -> bool:
        """Whether nothing counts as running."""
        router = self.stack.router
        return not (router.admission.turn_count or router.admission.held_bytes or router.routing.live.load.total)


@asynccontextmanager
async def front(folder: Path, change: Change = lambda config: config, **options: Any) -> AsyncIterator[Front]:
    """Starts a stack and an Envoy; at the end nothing may count as running."""
    async with router_stack(listen_ext_proc="127.0.0.1:0", **options) as stack:
        router = stack.router
        gateway = envoy(folder, http_port=router.http_port, picker_port=router.ext_proc_port, change=change)
        async with gateway as url:
            found = Front(stack, url)
            yield found
            await eventually(lambda: found.idle)


def error_of(got: Got) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    error: dict[str, Any] = json.loads(got.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def node_of(engine: FakeEngine) -> str:
    return f"{engine.role}-{engine.port}"


# The way it should go


@pytest.mark.parametrize("change", WAYS)
async def test_a_cold_turn_has_its_prefill_leg_and_streams_past_the_router(tmp_path: Path, change: Change) -> None:
    async with front(tmp_path, change) as found:
        got = await found.chat("hi", stream=True, headers={"x-request-id": "mine"})

        (prefill,), (decode,) = found.stack.prefill.legs, found.stack.decode.legs
    # Whoever read a hand-off frees it.
    assert found.stack.owner.released == []
    assert got.status == 200
    assert got.body == b"".join(map(event_of, found.stack.decode.text)) + b"data: [DONE]\n\n"
    assert (got.route, got.headers["x-request-id"], got.headers["cache-control"]) == ("cold", "mine", "no-cache")
    assert prefill.params is not None
    assert prefill.params["do_remote_decode"] is True
    assert decode.params is not None
    assert decode.params["remote_engine_id"] == found.stack.prefill.engine_id
    assert len(decode.params["backhaul"]["keys"]) == 1


@pytest.mark.parametrize("change", WAYS)
async def test_a_warm_turn_claims_reads_and_says_so(tmp_path: Path, change: Change) -> None:
    async with front(tmp_path, change) as found:
        found.stack.hold()
        found.stack.publish(label_key("hi"))
        got = await found.chat("hi", "hello", "more", stream=True)

        assert (got.status, got.route, got.headers["x-backhaul-source"]) == (200, "warm", "claimed")
        assert len(found.stack.owner.claims) == 1
        assert found.stack.prefill.legs[0].params["remote_block_ids"]  # type: ignore[index]  # checked by the engine


@pytest.mark.parametrize("change", WAYS)
async def test_a_whole_answer_comes_whole(tmp_path: Path, change: Change) -> None:
    async with front(tmp_path, change) as found:
        got = await found.chat("hi")

    assert (got.status, got.route) == (200, "cold")
    assert json.loads(got.body)["choices"][0]["message"]["content"] == "Hello there"


async def test_a_whole_answer_of_an_engine_without_the_connector_comes_without_handles(tmp_path: Path) -> None:
    async with front(tmp_path, decode=FakeEngine("decode", connector=False)) as found:
        got = await found.chat("hi")

    assert (got.status, got.headers["content-type"].partition(";")[0]) == (200, "application/json")
    document = json.loads(got.body)
    assert document["choices"][0]["message"]["content"] == "Hello there"
    assert "kv_transfer_params" not in document
    assert int(got.headers["content-length"]) == len(got.body)


async def test_where_handles_could_not_be_taken_out_no_engine_is_asked_for_an_answer(tmp_path: Path) -> None:
    async with front(tmp_path, in_pieces, decode=FakeEngine("decode", connector=False)) as found:
        got = await found.chat("hi")
        streamed = await found.chat("hi", stream=True)

        assert (got.status, "BUFFERED" in error_of(got)["message"]) == (500, True)
        assert (streamed.status, len(found.stack.decode.legs)) == (200, 1)


@pytest.mark.parametrize("change", WAYS)
async def test_no_response_is_streamed_by_an_engine_without_the_connector(tmp_path: Path, change: Change) -> None:
    body = json.dumps({"model": "tiny", "input": "hi", "stream": True}).encode()
    async with front(tmp_path, change, decode=FakeEngine("decode", connector=False)) as found:
        got = await found.send(body, path="/v1/responses")
        assert (got.status, "connector" in error_of(got)["message"]) == (500, True)
        assert found.stack.decode.legs == []


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_and_messages_pass_as_well(tmp_path: Path, stream: bool) -> None:
    responses = {"model": "tiny", "input": "hi", "stream": stream}
    messages = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": stream}
    async with front(tmp_path) as found:
        for path, body in (("/v1/responses", responses), ("/v1/messages", messages)):
            got = await found.send(json.dumps(body).encode(), path=path)
            assert (got.status, b"there" in got.body) == (200, True)
        refused = await found.send(json.dumps({**messages, "max_tokens": 0}).encode(), path="/v1/messages")
        assert (refused.status, json.loads(refused.body)["type"]) == (400, "error")
        passed = await found.send(json.dumps({"model": "tiny", "prompt": "hi"}).encode(), path="/tokenize")
        assert (passed.status, passed.headers["x-backhaul-reuse"]) == (200, "off")


async def test_completions_pass_as_well(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
        got = await found.send(body, path="/v1/completions?x=1")

    assert (got.status, json.loads(got.body)["choices"][0]["text"]) == (200, "Hello there")


# Bodies


@pytest.mark.parametrize("change", REQUESTS)
async def test_a_body_of_megabytes_arrives_whole(tmp_path: Path, change: Change) -> None:
    text = "word " * 1_000_000
    async with front(tmp_path, change) as found:
        got = await found.chat(text)

        (prefill,), (decode,) = found.stack.prefill.legs, found.stack.decode.legs
    assert got.status == 200
    assert prefill.body["messages"] == decode.body["messages"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize("change", REQUESTS)
async def test_a_body_in_chunks_is_put_together(tmp_path: Path, change: Change) -> None:
    data = json.dumps(chat_body("hi" * 50_000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 10_000):
            yield data[start : start + 10_000]

    async with front(tmp_path, change) as found:
        got = await found.send(pieces())

        (decode,) = found.stack.decode.legs
    assert got.status == 200
    assert decode.body["messages"] == [{"role": "user", "content": "hi" * 50_000}]


@pytest.mark.parametrize("change", REQUESTS)
async def test_a_body_that_ends_with_trailers_ends(tmp_path: Path, change: Change) -> None:
    data = json.dumps(chat_body("hi")).encode()
    async with front(tmp_path, lambda config: with_trailers(change(config))) as found:
        reader, writer = await asyncio.open_connection(*found.url.removeprefix("http://").split(":"))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(head.encode() + b"%x\r\n%b\r\n0\r\nx-trailer: a\r\n\r\n" % (len(data), data))
        status = await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        await writer.wait_closed()

    assert status == b"HTTP/1.1 200 OK\r\n"
    assert found.stack.decode.legs[0].body["messages"] == [{"role": "user", "content": "hi"}]


# What clients must not be able to say


@pytest.mark.parametrize("change", WAYS)
async def test_nothing_that_a_client_says_of_endpoints_ranks_or_blocks_reaches_an_engine(
    tmp_path: Path, change: Change
) -> None:
    async with FakeEngine("decode") as evil, front(tmp_path, change) as found:
        given = {
            "x-gateway-destination-endpoint": f"127.0.0.1:{evil.port}",
            "x-gateway-destination-endpoint-subset": f"127.0.0.1:{evil.port}",
            "x-data-parallel-rank": "7",
            "x-request-id": "mine",
            "cookie": "secret",
            "x-session-id": "s",
            "te": "trailers",
        }
        got = await found.chat("hi", headers=given, kv_transfer_params={"remote_host": "evil"})

        (decode,) = found.stack.decode.legs
    assert (got.status, evil.legs) == (200, [])
    assert decode.headers["x-gateway-destination-endpoint"] == f"127.0.0.1:{found.stack.decode.port}"
    assert decode.headers["x-data-parallel-rank"] == "0"
    assert decode.headers["x-request-id"] != "mine"
    assert not {"cookie", "x-session-id", "te", "x-gateway-destination-endpoint-subset"} & set(decode.headers)
    assert (decode.params or {}).get("remote_host") != "evil"
    assert not any("127.0.0.1" in value for value in got.headers.values())


async def test_a_key_of_a_tenant_is_asked_for_and_reaches_no_engine(tmp_path: Path) -> None:
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(f'[tenants.north]\nkey_sha256 = ["{hashlib.sha256(b"k").hexdigest()}"]')
    key.write_text("0123456789abcdef")
    async with front(tmp_path, tenants_file=str(tenants), cluster_key_file=str(key)) as found:
        refused = await found.chat("hi", headers={"authorization": "Bearer other"})
        got = await found.chat("hi", headers={"authorization": "Bearer k"})

        (decode,) = found.stack.decode.legs
    assert (refused.status, error_of(refused)["code"]) == (401, "invalid_api_key")
    assert got.status == 200
    assert "authorization" not in decode.headers
    assert decode.body["cache_salt"]


# Refusals


@pytest.mark.parametrize("change", REQUESTS)
async def test_bad_requests_are_refused_in_openais_form(tmp_path: Path, change: Change) -> None:
    async with front(tmp_path, change, body_limit=10_000) as found:
        answers = [
            await found.send(b"{"),
            await found.send(b"x" * 20_000),
            await found.send(b"{}", headers={"content-type": "text/plain"}),
            await found.chat("hi", model="other"),
        ]

        assert [got.status for got in answers] == [400, 413, 415, 404]
        assert all(error_of(got)["message"] and got.headers["x-request-id"] for got in answers)
        assert found.stack.prefill.legs == []


async def test_paths_that_begin_no_turn_are_the_routers_own(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        async with found.stack.client.get(f"{found.url}/v1/models") as response:
            models = await response.json()
        other = await found.send(b"{}", path="/v1/chat/completions/../../tokenize")
        wrong = await found.send(b"{}", path="/v1/audio/speech")

    assert [entry["id"] for entry in models["data"]] == ["tiny"]
    assert (other.status, wrong.status) == (404, 404)
    assert found.stack.decode.tokenized == []


async def test_without_an_engine_it_is_503_and_beyond_the_limit_429(tmp_path: Path) -> None:
    async with front(tmp_path, max_turns=1) as found:
        found.stack.prefill.then(hang())
        first = asyncio.create_task(found.chat("hi"))
        await eventually(lambda: len(found.stack.prefill.legs) == 1)
        shed = await found.chat("hi")
        first.cancel()
        await asyncio.wait([first])
        await eventually(lambda: found.idle)
        await found.stack.lose(found.stack.decode)
        none = await found.chat("hi")

    assert (shed.status, error_of(shed)["code"], shed.headers["retry-after"]) == (429, "too_many_turns", "1")
    assert (none.status, error_of(none)["code"]) == (503, "no_capacity")


# The gateway's own word


async def test_only_endpoints_that_the_gateway_names_are_picked(tmp_path: Path) -> None:
    async with FakeEngine("decode") as named, front(tmp_path, limited_to(f"127.0.0.1:{named.port}")) as found:
        none = await found.chat("hi")
        await found.stack.directory.add(named, agent=found.stack.owner.address)
        await eventually(lambda: found.stack.router.table.get(node_of(named)) is not None)
        found.stack.hold()
        found.stack.publish(label_key("hi"))
        answers = [await found.chat("hi", "hello", f"more {index}") for index in range(4)]

        assert (none.status, error_of(none)["message"]) == (503, "no decode node is ready")
        assert [got.status for got in answers] == [200] * 4
        assert (len(named.legs), len(found.stack.decode.legs)) == (4, 0)


async def test_where_the_gateway_names_none_there_is_none(tmp_path: Path) -> None:
    async with front(tmp_path, limited_to()) as found:
        got = await found.chat("hi")

        assert (got.status, found.stack.prefill.legs) == (503, [])


# Clients that leave


async def test_a_client_that_leaves_ends_the_prefill_leg(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.prefill.then(hang())
        asked = asyncio.create_task(found.chat("hi"))
        await eventually(lambda: len(found.stack.prefill.legs) == 1)
        asked.cancel()
        await asyncio.wait([asked])

        await asyncio.wait_for(found.stack.prefill.legs[0].closed_early.wait(), 5)
        assert found.stack.decode.legs == []


async def test_a_client_that_leaves_ends_the_decode_leg(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.decode.chunk_gate = asyncio.Event()
        body = json.dumps(chat_body("hi", stream=True)).encode()
        async with found.stack.client.post(f"{found.url}{CHAT}", data=body, headers=JSON) as response:
            await response.content.readany()
            assert not found.idle
        response.close()

        await asyncio.wait_for(found.stack.decode.legs[0].closed_early.wait(), 5)
        await eventually(lambda: found.idle)


# Failures


async def test_an_engine_that_refuses_connections_is_avoided_and_its_hand_off_freed(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        await found.stack.decode.stop()
        got = await found.chat("hi")

        assert (got.status, got.headers["retry-after"]) == (503, "1")
        assert error_of(got)["message"] == "the decode engine failed (refused)"
        assert found.state is BreakerState.OPEN
        await eventually(lambda: len(found.stack.owner.released) == 1)


async def test_an_engines_own_errors_pass_and_only_faults_count_against_it(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.decode.then(*([refuse(400, "too long")] * 3))
        refused = [await found.chat("hi") for _ in range(3)]
        before = found.state
        found.stack.decode.then(*([bare_500()] * 3))
        failed = [await found.chat("hi") for _ in range(3)]

        assert [(got.status, error_of(got)["message"]) for got in refused] == [(400, "too long")] * 3
        assert [got.status for got in failed] == [500] * 3
        assert (before, found.state) == (BreakerState.CLOSED, BreakerState.OPEN)


async def test_a_turn_whose_blocks_cannot_be_read_is_computed_and_says_the_same(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        right = await found.chat("hi", "hello", "more", stream=True)
        found.stack.hold()
        found.stack.publish(label_key("hi"))
        found.stack.prefill.then(bare_500())
        got = await found.chat("hi", "hello", "more", stream=True)

    assert (got.status, got.route, got.miss, got.body) == (200, "cold", "prefill_failed", right.body)


# What the router learns


async def test_routers_hear_how_long_a_stream_took_to_begin(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        costs, key = found.stack.router.routing.live.costs, (node_of(found.stack.decode), found.stack.decode.engine_id)
        unknown = costs.decode_s(key, moved=1_000)
        await found.chat("hi", stream=True)
        await eventually(lambda: costs.decode_s(key, moved=1_000) != unknown)


async def test_an_engine_that_breaks_off_an_answer_is_avoided(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.decode.then(break_after([event_of("Hel")]))
        with pytest.raises(aiohttp.ClientPayloadError):
            await found.chat("hi", stream=True)

        await eventually(lambda: found.state is BreakerState.OPEN)


async def test_a_client_that_leaves_in_the_middle_is_not_its_engines_fault(tmp_path: Path) -> None:
    async with front(tmp_path) as found:
        found.stack.decode.chunk_gate = asyncio.Event()
        body = json.dumps(chat_body("hi", stream=True)).encode()
        async with found.stack.client.post(f"{found.url}{CHAT}", data=body, headers=JSON) as response:
            await response.content.readany()
        response.close()
        await eventually(lambda: found.idle)
        # What Envoy logs comes a second later at the latest.
        await asyncio.sleep(1.2)

        assert found.state is BreakerState.CLOSED


async def test_short_streams_lose_nothing(tmp_path: Path) -> None:
    """Their end comes while the router is still being asked about their head."""
    async with front(tmp_path) as found:
        answers = [await found.chat("hi", stream=True) for _ in range(40)]

    right = b"".join(map(event_of, found.stack.decode.text)) + b"data: [DONE]\n\n"
    assert [got.body for got in answers] == [right] * 40


# Limits


@pytest.mark.parametrize("change", REQUESTS)
async def test_a_body_that_does_not_come_is_waited_for_as_long_as_the_gateway_says_and_a_prefill_leg_longer(
    tmp_path: Path, change: Change
) -> None:
    def hasty(config: str) -> str:
        return change(config).replace("          request_timeout: 60s\n", "          request_timeout: 1s\n")

    async with front(tmp_path, hasty, receive_timeout_s=60.0) as found:

        async def stalled() -> AsyncIterator[bytes]:
            yield b'{"model": '
            await asyncio.sleep(30)

        assert (await found.send(stalled())).status == 408
        found.stack.prefill.then(late(2.5))
        assert (await found.chat("hi")).status == 200


async def test_a_gateway_takes_as_many_connections_as_it_says(tmp_path: Path) -> None:
    def few(config: str) -> str:
        return config.replace("max_active_downstream_connections: 4096", "max_active_downstream_connections: 2")

    async with front(tmp_path, few) as found:
        host, port = found.url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        (refused, _) = opened[2]
        assert await asyncio.wait_for(refused.read(), 10) == b""
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()
