"""One stream of a gateway: its messages in order, and its end at any moment."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul_router.exchange import Exchange, GoneError

PIECE = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x"))
ANSWER = pb.ProcessingRequest(response_headers=pb.HttpHeaders())


async def stream(
    *messages: pb.ProcessingRequest, ends: asyncio.Event | None = None
) -> AsyncIterator[pb.ProcessingRequest]:
    for message in messages:
        yield message
    if ends is not None:
        await ends.wait()


async def nowhere(message: pb.ProcessingResponse) -> None:
    raise AssertionError


async def test_messages_come_in_order_and_then_the_end_again_and_again() -> None:
    async with Exchange(stream(*[PIECE] * 9, ANSWER), nowhere) as exchange:
        assert [await exchange.next() for _ in range(10)] == [*[PIECE] * 9, ANSWER]
        for _ in range(2):
            with pytest.raises(GoneError):
                await exchange.next()


async def attend(exchange: Exchange, ends: asyncio.Event) -> None:
    """Takes one message, and waits for something else."""
    async with exchange.attended():
        await exchange.next()
        ends.set()
        await asyncio.Event().wait()


async def test_what_is_attended_ends_when_the_stream_ends() -> None:
    ends = asyncio.Event()
    async with Exchange(stream(PIECE, ends=ends), nowhere) as exchange:
        with pytest.raises(GoneError):
            await attend(exchange, ends)


async def test_what_is_attended_ends_when_the_gateway_answers_by_itself() -> None:
    async with Exchange(stream(PIECE, ANSWER, ends=asyncio.Event()), nowhere) as exchange:
        with pytest.raises(GoneError):
            await attend(exchange, asyncio.Event())


async def test_the_stream_may_end_while_what_is_attended_still_ends() -> None:
    begun, ending = asyncio.Event(), asyncio.Event()

    async def answers_and_ends() -> AsyncIterator[pb.ProcessingRequest]:
        await begun.wait()
        yield ANSWER
        await ending.wait()

    async def closes_slowly() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ending.set()
            for _ in range(5):
                await asyncio.sleep(0)

    async with Exchange(answers_and_ends(), nowhere) as exchange:
        with pytest.raises(GoneError):
            async with exchange.attended():
                await closes_slowly()
        assert await exchange.next() == ANSWER
        with pytest.raises(GoneError):
            await asyncio.wait_for(exchange.next(), 1)


async def test_what_is_not_attended_goes_on() -> None:
    async with Exchange(stream(), nowhere) as exchange:
        await asyncio.sleep(0)
        async with asyncio.timeout(None):
            await asyncio.sleep(0)
        with pytest.raises(GoneError):
            await exchange.next()


async def test_it_can_be_ended_from_this_side() -> None:
    async with Exchange(stream(ends=asyncio.Event()), nowhere) as exchange:
        waiting = asyncio.create_task(exchange.next())
        await asyncio.sleep(0)
        exchange.end()
        with pytest.raises(GoneError):
            await waiting


async def test_what_cannot_be_sent_shows_that_the_gateway_has_gone() -> None:
    async def broken(message: pb.ProcessingResponse) -> None:
        raise grpc.aio.InternalError

    async with Exchange(stream(ends=asyncio.Event()), broken) as exchange:
        with pytest.raises(GoneError):
            await exchange.write(pb.ProcessingResponse())
