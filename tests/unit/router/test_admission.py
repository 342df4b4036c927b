"""What a router takes on at once, what waits, and what it refuses."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest

from backhaul_router.admission import MAX_ENDINGS, MAX_LISTS, Admission
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits, TurnQueue
from tests.fakes.clock import FakeClock, settle


def admission(
    *,
    max_turns: int = 2,
    max_queued: int = 0,
    queue_timeout_s: float = 30.0,
    max_held_bytes: int = 100,
    clock: FakeClock | None = None,
    **limits: TenantLimits,
) -> Admission:
    return Admission(
        turns=TurnQueue(max_turns=max_turns, max_queued=max_queued, limits=limits),
        queue_timeout_s=queue_timeout_s,
        max_held_bytes=max_held_bytes,
        clock=clock or FakeClock(),
    )


async def refusal(limits: Admission, tenant: str = "", *, left_s: float = math.inf) -> ApiError:
    """Returns why a turn is refused."""
    with pytest.raises(ApiError) as caught:
        async with limits.turn(tenant, left_s=left_s):
            pass
    return caught.value


async def test_a_turn_beyond_the_limit_is_refused_until_another_ends() -> None:
    limits = admission(max_turns=2)
    async with limits.turn():
        async with limits.turn():
            refused = await refusal(limits)
            assert (refused.status, refused.code) == (429, "too_many_turns")
            assert refused.headers == {"retry-after": "1"}
            assert "2 turns" in refused.message
        async with limits.turn():
            assert limits.turn_count == 2
    assert limits.turn_count == 0


@pytest.mark.parametrize("error", [None, RuntimeError, GeneratorExit, asyncio.CancelledError])
async def test_a_turn_is_counted_out_once_however_it_ends(error: type[BaseException] | None) -> None:
    limits = admission()
    with pytest.raises(error) if error else nullcontext():
        async with limits.turn(byte_count=20) as held:
            held.grow(40)
            assert (limits.turn_count, limits.held_bytes) == (1, 60)
            if error:
                raise error
    assert (limits.turn_count, limits.held_bytes) == (0, 0)


async def test_bodies_beyond_the_limit_are_refused_whoever_holds_them() -> None:
    limits = admission(max_held_bytes=100)
    async with limits.turn() as first, limits.turn() as second:
        first.grow(60)
        second.grow(40)
        with pytest.raises(ApiError) as caught:
            first.grow(1)
        assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
        assert "100 bytes" in caught.value.message
        assert limits.held_bytes == 100
    assert limits.held_bytes == 0


async def test_model_lists_are_limited_apart_from_turns() -> None:
    limits = admission(max_turns=1)
    lists = [limits.listing() for _ in range(MAX_LISTS)]
    for entered in lists:
        entered.__enter__()
    with pytest.raises(ApiError) as caught, limits.listing():
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_lists")
    async with limits.turn():
        pass
    for entered in lists:
        entered.__exit__(None, None, None)
    with limits.listing():
        pass


def test_endings_are_limited_and_hold_bytes_as_turns_do() -> None:
    limits = admission(max_held_bytes=MAX_ENDINGS)
    endings = [limits.ending(1) for _ in range(MAX_ENDINGS)]
    for entered in endings[:-1]:
        entered.__enter__()
    with pytest.raises(ApiError) as caught, limits.ending(2):
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
    with endings[-1], pytest.raises(ApiError) as caught, limits.ending():
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_endings")
    for entered in endings[:-1]:
        entered.__exit__(None, None, None)
    assert limits.held_bytes == 0


def test_the_body_of_a_question_is_held_while_it_is_answered() -> None:
    limits = admission(max_held_bytes=10)
    with limits.listing(10):
        with pytest.raises(ApiError) as caught, limits.listing(1):
            pass
        assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
    assert limits.held_bytes == 0


async def test_refusals_are_logged_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, clock=clock)
    async with limits.turn():
        for _ in range(50):
            await refusal(limits)
        await clock.advance(11)
        await refusal(limits)
    assert "".join(capsys.readouterr()).count("refusing requests") == 2


# The queue


class Turn:
    """A turn in a task of its own, until it is told to end."""

    def __init__(self, limits: Admission, tenant: str = "", *, left_s: float = math.inf, byte_count: int = 0) -> None:
        self.running = False
        self._ending = asyncio.Event()
        self.task = asyncio.create_task(self._run(limits, tenant, left_s, byte_count))

    async def _run(self, limits: Admission, tenant: str, left_s: float, byte_count: int) -> None:
        async with limits.turn(tenant, left_s=left_s, byte_count=byte_count):
            self.running = True
            await self._ending.wait()

    async def end(self) -> None:
        self._ending.set()
        await self.task
        await settle()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    @property
    def refused(self) -> tuple[int, str, str]:
        """Status, code and `Retry-After` of its refusal."""
        error = self.task.exception()
        assert isinstance(error, ApiError)
        return error.status, str(error.code), error.headers["retry-after"]


@contextlib.asynccontextmanager
async def running(limits: Admission, *tenants: str) -> AsyncIterator[list[Turn]]:
    """Begins turns one after the other; ends what is left of them, and checks that nothing stays counted."""
    turns = []
    for tenant in tenants:
        turns.append(Turn(limits, tenant))
        await settle()
    yield turns
    for turn in turns:
        await turn.leave()
    assert (limits.turn_count, limits.queued_count, limits.held_bytes) == (0, 0, 0)
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_turn_that_waits_runs_as_soon_as_another_ends() -> None:
    limits = admission(max_turns=1, max_queued=1)
    async with running(limits, "a", "a") as (first, second):
        assert (limits.turn_count, limits.queued_count, second.running) == (1, 1, False)
        await first.end()
        assert (limits.turn_count, limits.queued_count, second.running) == (1, 0, True)


async def test_what_a_waiting_turn_holds_is_counted() -> None:
    limits = admission(max_turns=1, max_queued=2)
    async with running(limits, "a"):
        waiting = Turn(limits, "a", byte_count=80)
        await settle()
        assert limits.held_bytes == 80
        refused = Turn(limits, "a", byte_count=21)
        await settle()
        assert refused.refused[:2] == (429, "too_many_bytes")
        await waiting.leave()


async def test_a_client_that_leaves_while_it_waits_frees_its_place_at_once() -> None:
    limits = admission(max_turns=1, max_queued=1)
    async with running(limits, "a", "a") as (_, waiting):
        await waiting.leave()
        assert limits.queued_count == 0


async def test_a_client_that_leaves_in_the_moment_it_may_run_lets_the_next_one_run() -> None:
    limits = admission(max_turns=1, max_queued=2)
    async with running(limits, "a", "a", "a") as (first, second, third):
        first._ending.set()
        await first.task
        assert not second.running
        second.task.cancel()
        await settle()
        assert (second.running, third.running, limits.turn_count) == (False, True, 1)


async def test_one_that_waits_too_long_is_refused_with_a_503() -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, max_queued=1, queue_timeout_s=5.0, clock=clock)
    async with running(limits, "a", "a") as (_, waiting):
        await clock.advance(4.9)
        assert not waiting.task.done()
        await clock.advance(0.2)
        assert waiting.refused == (503, "queue_timeout", "1")
        assert "5 s" in str(waiting.task.exception())
        assert limits.queued_count == 0


async def test_one_whose_deadline_passes_while_it_waits_gets_a_504() -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, max_queued=1, queue_timeout_s=5.0, clock=clock)
    async with running(limits, "a"):
        waiting = Turn(limits, "a", left_s=2.0)
        await clock.advance(2.1)
        assert waiting.refused[:2] == (504, "deadline_passed")


async def test_one_that_may_run_in_the_moment_its_time_is_up_runs() -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, max_queued=1, queue_timeout_s=5.0, clock=clock)
    async with running(limits, "a", "a") as (first, second):
        first._ending.set()
        await clock.advance(5.0)
        assert second.running


async def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_the_client_told_when_to_come_back() -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, max_queued=9, clock=clock)
    async with running(limits, "a"):
        await clock.advance(7.5)
    async with running(limits, "a", "a"):
        refused = await refusal(limits, "a", left_s=10.0)
        assert (refused.status, refused.code) == (503, "deadline_unreachable")
        assert refused.headers == {"retry-after": "15"}
        assert "15 s" in refused.message


async def test_nobody_is_told_to_stay_away_for_more_than_a_minute() -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, clock=clock)
    async with running(limits, "a"):
        await clock.advance(1000.0)
    async with running(limits, "a"):
        assert (await refusal(limits, "a")).headers == {"retry-after": "60"}


async def test_a_turn_that_has_to_make_room_is_told_so() -> None:
    limits = admission(max_turns=1, max_queued=1, high=TenantLimits(priority=1))
    async with running(limits, "a", "a", "high") as (first, displaced, high):
        assert displaced.refused == (429, "displaced", "1")
        await first.end()
        assert high.running


async def test_a_tenant_at_its_limit_is_told_that_it_is_its_own() -> None:
    limits = admission(max_turns=2, max_queued=5, a=TenantLimits(max_turns=1, max_queued=0))
    async with running(limits, "a", "b"):
        refused = await refusal(limits, "a")
        assert (refused.status, refused.code) == (429, "tenant_limit")
        assert "your tenant" in refused.message


async def test_new_limits_count_at_once_and_end_nothing() -> None:
    limits = admission(max_turns=3, max_queued=3, a=TenantLimits(max_turns=1))
    async with running(limits, "a", "a") as (first, second):
        limits.limit({"a": TenantLimits(max_turns=2)})
        await settle()
        assert second.running
        limits.limit({"a": TenantLimits(max_turns=1, max_queued=0)})
        await settle()
        assert (await refusal(limits, "a")).code == "tenant_limit"
        assert limits.turn_count == 2
        await first.end()
        await second.end()


async def test_with_many_turns_that_come_and_go_everybody_is_served_or_told_why() -> None:
    clock = FakeClock()
    limits = admission(max_turns=3, max_queued=20, clock=clock, b=TenantLimits(max_turns=1), c=TenantLimits(priority=1))
    most = 0

    async def ask(number: int) -> str:
        nonlocal most
        try:
            async with limits.turn("abc"[number % 3]):
                most = max(most, limits.turn_count)
                await clock.sleep(1 + number % 4)
        except ApiError as error:
            return str(error.code)
        return "served"

    asked = [asyncio.create_task(ask(number)) for number in range(60)]
    await settle()
    for task in asked[::7]:
        task.cancel()
    while not all(task.done() for task in asked):
        await clock.advance(1)
    got = [task.result() for task in asked if not task.cancelled()]
    assert set(got) == {"served", "too_many_turns", "tenant_limit", "displaced"}
    assert got.count("served") >= 3 + 20 - len(asked[::7])
    assert most == 3
    assert (limits.turn_count, limits.queued_count) == (0, 0)
