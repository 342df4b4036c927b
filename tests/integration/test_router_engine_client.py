"""What is known of a prefill leg's bytes: whether any was sent."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from backhaul_router.core.engines import EngineError, Failure, Reply
from backhaul_router.engine_client import EngineClient, EngineTimeouts
from tests.fakes.engine import FakeEngine, hang
from tests.fakes.eventually import eventually

BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1}'
LIMITS = EngineTimeouts(connect_s=30, prefill_s=30, warm_prefill_s=30, first_byte_s=30, idle_s=30)


@pytest.fixture
async def engines() -> AsyncIterator[EngineClient]:
    async with EngineClient(timeouts=LIMITS, answer_bytes=1024, late_limit=1) as engines:
        yield engines


async def ask(engines: EngineClient, url: str, sent: list[bool]) -> Reply:
    headers = {"x-request-id": str(id(sent))}
    url = f"{url}/v1/chat/completions"
    return await engines.prefill(
        url, BODY, headers, warm=True, again=False, on_sent=lambda: sent.append(True), late=lambda reply: None
    )


async def test_a_leg_that_is_answered_was_sent(engines: EngineClient) -> None:
    sent: list[bool] = []
    async with FakeEngine("prefill") as engine:
        assert (await ask(engines, engine.url, sent)).status == 200
    assert sent == [True]


async def test_a_leg_that_is_left_while_the_engine_works_was_sent(engines: EngineClient) -> None:
    sent: list[bool] = []
    async with FakeEngine("prefill") as engine:
        engine.then(hang())
        asking = asyncio.ensure_future(ask(engines, engine.url, sent))
        await eventually(lambda: len(engine.legs) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert sent == [True]


async def test_a_leg_that_nobody_accepts_was_not_sent(engines: EngineClient) -> None:
    sent: list[bool] = []
    async with FakeEngine("prefill") as engine:
        gone = engine.url
    with pytest.raises(EngineError) as caught:
        await ask(engines, gone, sent)
    assert (caught.value.failure, sent) == (Failure.REFUSED, [])


async def test_a_leg_that_is_left_before_it_is_connected_never_is_sent(engines: EngineClient) -> None:
    sent: list[bool] = []
    async with FakeEngine("prefill") as engine:
        asking = asyncio.ensure_future(ask(engines, engine.url, sent))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await ask(engines, engine.url, [])).status == 200
        assert len(engine.legs) == 1
    assert sent == []
