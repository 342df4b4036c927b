"""The Python client against a router over real channels."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from backhaul_client import (
    BackhaulError,
    Cause,
    Client,
    DeadlineExceededError,
    EngineFailedError,
    Gateway,
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    RefusedByStateError,
    Retries,
    UnavailableError,
)
from backhaul_client.client import Body
from backhaul_router.core.health.breakers import BreakerState
from backhaul_router.core.lookup import session_key
from tests.fakes.engine import break_after, event_of, hang, refuse
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, chat_body, router_stack

BODY = chat_body("hi", stream=True)
WHOLE = chat_body("hi")


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(listen_gateway="127.0.0.1:0", max_turns=1) as stack:
        yield stack
        await eventually(lambda: idle(stack))


@pytest.fixture
async def client(stack: RouterStack) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{stack.router.grpc_port}", retries=Retries(attempts=1)) as client:
        yield client


@pytest.fixture
async def gateway(stack: RouterStack) -> AsyncIterator[Gateway]:
    async with Gateway(f"127.0.0.1:{stack.router.gateway_port}") as gateway:
        yield gateway


def idle(stack: RouterStack) -> bool:
    router = stack.router
    return not (router.admission.turn_count or router.admission.held_bytes or router.routing.live.load.total)


async def test_a_stream_gives_its_texts_and_says_how_it_is_served(client: Client) -> None:
    async with client.chat(BODY, timeout_s=10) as answer:
        texts = [text async for text in answer.texts()]

    assert texts == ["Hel", "lo", " there"]
    assert (answer.started.route, answer.started.miss_reason, answer.started.streamed) == ("cold", "first_turn", True)


async def test_a_whole_answer_is_a_document(client: Client) -> None:
    async with client.chat(WHOLE, timeout_s=10) as answer:
        document = await answer.document()
    async with client.complete({"model": "tiny", "prompt": "once"}, timeout_s=10) as answer:
        completion = await answer.document()

    assert document["choices"][0]["message"]["content"] == "Hello there"
    assert completion["choices"][0]["text"] == "Hello there"


async def test_a_conversation_remembers_is_warm_and_ends(stack: RouterStack, client: Client) -> None:
    async with client.conversation("tiny", messages=[{"role": "system", "content": "be kind"}]) as conversation:
        assert await conversation.ask("hi", timeout_s=10) == "Hello there"
        stack.hold()
        stack.publish(session_key(conversation.session_id.encode()))
        assert await conversation.ask("more", timeout_s=10) == "Hello there"
        assert conversation.started is not None
        route = conversation.started.route
        stack.hold("set-2")
        stack.publish(session_key(conversation.session_id.encode()), "set-2")

    asked = [leg.body["messages"] for leg in stack.decode.legs]
    assert [message["content"] for message in asked[1]] == ["be kind", "hi", "Hello there", "more"]
    assert route == "warm"
    assert "set-2" in stack.owner.released_sets


async def test_the_models(client: Client) -> None:
    assert [entry["id"] for entry in await client.models(timeout_s=10)] == ["tiny"]


async def test_errors_have_their_type_reason_and_time(stack: RouterStack, client: Client) -> None:
    async def error_of(body: Body = BODY, timeout_s: float = 10.0) -> BackhaulError:
        with pytest.raises(BackhaulError) as caught:
            await _read(client, body, timeout_s)
        return caught.value

    assert isinstance(await error_of(b"{"), InvalidRequestError)
    assert isinstance(await error_of(chat_body("hi", model="other")), NotFoundError)
    stack.decode.then(break_after([event_of("Hel")]))
    assert isinstance(await error_of(), EngineFailedError)
    stack.prefill.then(hang())
    late = await error_of(timeout_s=0.5)
    assert (type(late), late.reason) == (DeadlineExceededError, "DEADLINE_EXCEEDED")
    await eventually(lambda: idle(stack))
    stack.prefill.then(hang())
    async with contextlib.AsyncExitStack() as exits:
        running = asyncio.ensure_future(exits.enter_async_context(client.chat(BODY)))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        full = await error_of()
        running.cancel()
        await asyncio.wait([running])
    assert (type(full), full.reason, full.retry_after_s) == (LimitReachedError, "TOO_MANY_TURNS", 1.0)
    assert full.nothing_begun
    await stack.lose(stack.decode)
    await stack.lose(stack.prefill)
    await eventually(lambda: idle(stack))
    assert isinstance(await error_of(), UnavailableError)
    assert isinstance(await _explain_error(client), RefusedByStateError)


async def _explain_error(client: Client) -> BackhaulError:
    with pytest.raises(BackhaulError) as caught:
        await client.explain(WHOLE, timeout_s=10)
    return caught.value


async def test_a_turn_that_found_the_router_full_is_made_again(stack: RouterStack) -> None:
    stack.prefill.then(hang())
    async with Client(f"127.0.0.1:{stack.router.grpc_port}") as client:
        first = asyncio.ensure_future(_read(client))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        second = asyncio.ensure_future(_read(client))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.wait([first])

        assert await asyncio.wait_for(second, 10) == "Hello there"


async def _read(client: Client, body: Body = BODY, timeout_s: float = 20.0) -> str:
    async with client.chat(body, timeout_s=timeout_s) as answer:
        return "".join([text async for text in answer.texts()])


@pytest.mark.parametrize("how", ["left", "late"])
async def test_who_does_not_read_on_ends_the_decode_leg(stack: RouterStack, client: Client, how: str) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    with contextlib.suppress(DeadlineExceededError):
        async with client.chat(BODY, timeout_s=1.0 if how == "late" else 20) as answer:
            async for _ in answer.texts():
                if how == "left":
                    break

    await asyncio.wait_for(stack.decode.legs[0].closed_early.wait(), 5)


async def test_a_planned_turn_is_told_to_the_end(stack: RouterStack, gateway: Gateway) -> None:
    async with await gateway.plan(BODY, timeout_s=10) as turn:
        await turn.sending()
        async with stack.client.post(turn.leg.url, data=turn.leg.body, headers=turn.leg.headers) as answer:
            await turn.first_byte(0.01)
            body = await answer.read()
        await turn.done()

    assert (answer.status, turn.started.route) == (200, "cold")
    assert body.endswith(b"data: [DONE]\n\n")
    assert idle(stack)


async def test_a_planned_turn_that_is_left_is_told_to_be(stack: RouterStack, gateway: Gateway) -> None:
    async with await gateway.plan(BODY, timeout_s=10):
        assert not idle(stack)

    assert idle(stack)
    await eventually(lambda: len(stack.owner.released) == 1)


async def test_a_planned_turn_that_fails_counts_against_its_engine(stack: RouterStack, gateway: Gateway) -> None:
    async with await gateway.plan(BODY, timeout_s=10) as turn:
        await turn.sending()
        await turn.failed(Cause.NOT_CONNECTED)
    (decode,) = [node for node in stack.router.table if node.role.value == "decode"]
    assert stack.router.routing.live.breakers.state(decode) is BreakerState.OPEN

    with pytest.raises(RefusedByStateError) as over:
        await turn.sending()
    assert (over.value.reason, over.value.metadata["how"]) == ("TURN_OVER", "failed")


async def test_an_engines_refusal_is_passed_on(stack: RouterStack, gateway: Gateway) -> None:
    stack.prefill.then(refuse(400, "too long"))

    with pytest.raises(InvalidRequestError, match="too long"):
        await gateway.plan(BODY, timeout_s=10)
