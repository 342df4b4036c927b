"""A reply that comes just after its caller has left is not lost."""

import asyncio

import pytest

from backhaul_router import late_replies
from backhaul_router.core.engines import EngineError, Failure, Reply
from backhaul_router.late_replies import LateReplies

REPLY = Reply(200, {}, b"{}")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test ends because its machine is slow."""
    monkeypatch.setattr(late_replies, "READ_ON_S", 60.0)


class Engine:
    """Answers when told to."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.closed = False
        self.failure: Failure | None = None

    async def answer(self) -> Reply:
        try:
            await self.told.wait()
        except asyncio.CancelledError:
            self.closed = True
            raise
        if self.failure:
            raise EngineError(self.failure)
        return REPLY


async def left(replies: LateReplies, engine: Engine, late: list[Reply], *, sent: bool = True) -> None:
    """Asks, and leaves before there is an answer."""
    asking = asyncio.ensure_future(replies.reply(engine.answer(), late.append, sent=lambda: sent))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_reply_that_somebody_waits_for_is_not_late() -> None:
    late: list[Reply] = []
    async with LateReplies(1) as replies:
        engine = Engine()
        engine.told.set()
        assert await replies.reply(engine.answer(), late.append, sent=lambda: True) is REPLY
        engine.failure = Failure.TIMEOUT
        with pytest.raises(EngineError):
            await replies.reply(engine.answer(), late.append, sent=lambda: True)
    assert late == []


async def test_a_late_reply_is_taken_and_a_late_failure_is_not() -> None:
    late: list[Reply] = []
    async with LateReplies(2) as replies:
        well, failing = Engine(), Engine()
        failing.failure = Failure.DISCONNECTED
        for engine in (well, failing):
            await left(replies, engine, late)
            engine.told.set()
        await turns_of_the_loop()
        assert late == [REPLY]
        assert not well.closed


async def test_nothing_is_waited_for_beyond_the_time_the_limit_or_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Reply] = []
    async with LateReplies(1) as replies:
        engines = Engine(), Engine()
        for engine in engines:
            await left(replies, engine, late)
        await turns_of_the_loop()
        assert [engine.closed for engine in engines] == [False, True]
    assert engines[0].closed
    monkeypatch.setattr(late_replies, "READ_ON_S", 0.0)
    async with LateReplies(1) as replies:
        engine = Engine()
        await left(replies, engine, late)
        await turns_of_the_loop()
        assert engine.closed
    assert late == []


async def test_what_was_not_sent_when_its_caller_left_never_is() -> None:
    late: list[Reply] = []
    async with LateReplies(1) as replies:
        engine = Engine()
        await left(replies, engine, late, sent=False)
        engine.told.set()
        await turns_of_the_loop()
        assert engine.closed
    assert late == []
