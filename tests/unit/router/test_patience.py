"""How long a piece of an answer is waited for."""

import asyncio
from collections.abc import Callable

from backhaul_router.patience import Patience


class FakeTimer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A loop whose time is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(self.now + delay, callback))
        return self.timers[-1]

    def pass_s(self, seconds: float) -> None:
        """Lets time pass, and what is due meanwhile happen."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= until and not timer.cancelled]:
            timer = min(due, key=lambda timer: timer.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.callback()
        self.now = until


async def begun(patience: Patience, future: "asyncio.Future[bytes]") -> "asyncio.Task[bytes]":
    task = asyncio.ensure_future(patience.awaiting(future))
    await asyncio.sleep(0)
    return task


async def test_a_wait_that_takes_too_long_is_given_up_and_at_its_limit() -> None:
    loop, given_up, future = FakeLoop(), list[TimeoutError](), asyncio.get_running_loop().create_future()
    with Patience(10.0, given_up.append, loop) as patience:
        loop.pass_s(7.0)
        task = await begun(patience, future)
        loop.pass_s(9.9)
        assert given_up == []
        loop.pass_s(0.2)
        assert [str(error) for error in given_up] == ["nothing came for 10 s"]
        future.set_result(b"")
        await task


async def test_waits_that_are_short_enough_do_not_add_up_and_take_one_timer() -> None:
    loop, given_up = FakeLoop(), list[TimeoutError]()
    with Patience(10.0, given_up.append, loop) as patience:
        for _ in range(5):
            future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            task = await begun(patience, future)
            loop.pass_s(9.0)
            future.set_result(b"a")
            assert await task == b"a"
            assert len(loop.timers) == 1
    assert given_up == []


async def test_what_happens_between_waits_may_take_its_time() -> None:
    loop, given_up = FakeLoop(), list[TimeoutError]()
    with Patience(10.0, given_up.append, loop):
        loop.pass_s(1_000.0)
    assert given_up == []
    assert all(timer.cancelled for timer in loop.timers)


async def test_a_wait_that_is_only_told_of_is_given_up_at_its_limit_too() -> None:
    loop, given_up = FakeLoop(), list[TimeoutError]()
    with Patience(10.0, given_up.append, loop) as patience:
        for _ in range(5):
            patience.began()
            loop.pass_s(9.9)
            patience.ended()
            loop.pass_s(9.9)
        assert given_up == []
        patience.began()
        loop.pass_s(9.9)
        assert given_up == []
        loop.pass_s(0.2)
        assert len(given_up) == 1
