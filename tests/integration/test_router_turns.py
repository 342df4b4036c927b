"""Whole turns over real sockets."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from backhaul_router.core.body import Endpoint, parse_body
from backhaul_router.core.lookup import keys_of
from tests.fakes.router_stack import RouterStack, chat_body, router_stack


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def label_key(*contents: str) -> str:
    """Returns the chain key under which a chat turn is labelled."""
    body = parse_body(Endpoint.CHAT, msgspec.json.encode(chat_body(*contents)))
    return keys_of(body, None).label[-1]


async def test_a_first_turn_is_cold_and_labelled_for_the_next(stack: RouterStack) -> None:
    got = await stack.chat("hi", stream=True)
    assert got.status == 200
    assert (got.route, got.miss) == ("cold", "first_turn")
    (decode,) = stack.decode.legs
    assert decode.params is not None
    assert decode.params["backhaul"]["keys"] == [label_key("hi")]
    assert decode.params["remote_engine_id"] == stack.prefill.engine_id


async def test_the_next_turn_reads_what_the_first_left(stack: RouterStack) -> None:
    stack.hold(tokens=128)
    stack.publish(label_key("hi"))
    got = await stack.chat("hi", "hello", "more", stream=True)
    assert (got.status, got.route, got.miss) == (200, "warm", "")
    assert got.headers["x-backhaul-read-tokens"] == "128"
    (prefill,) = stack.prefill.legs
    assert prefill.params is not None
    assert prefill.params["remote_request_id"] == "set-1"
    assert prefill.params["do_remote_decode"] is True
    assert stack.owner.returned == []
