"""Simulated engines: right by themselves, and as wrong as vLLM when they read what they should not."""

import asyncio
import contextlib

import pytest

from backhaul_simulator import notifications
from backhaul_simulator.requests import EngineDeadError, LoadFailedError, Request
from tests.fakes.eventually import eventually
from tests.fakes.nixl_peer import NixlPeer
from tests.unit.simulator.engines import PREFILL, TURN, all_free, decode, engines, prefill, run, truth


async def test_an_answer_is_the_models_own(side_channel: int) -> None:
    async with engines(1, port=side_channel) as (engine,):
        answer, last = await run(engine, TURN, max_tokens=200)
        assert answer == truth(TURN, 200, ignore_eos=False)
        assert last.finish_reason == ("length" if len(answer) == 200 else "stop")
        assert last.kv_transfer_params is None
        await all_free(engine)


async def test_the_prefix_cache_saves_work_and_changes_nothing(side_channel: int) -> None:
    async with engines(1, port=side_channel) as (engine,):
        await run(engine, TURN)
        answer, last = await run(engine, [*TURN, 7])
        assert last.cached_tokens == 288
        assert answer == truth([*TURN, 7])[: len(answer)]
        _, other = await run(engine, [*TURN, 7], cache_salt="another")
        assert other.cached_tokens == 0
        assert engine.reset_prefix_cache()
        _, cold = await run(engine, [*TURN, 7])
        assert cold.cached_tokens == 0


async def test_requests_that_share_too_little_memory_give_way_and_still_answer_right(side_channel: int) -> None:
    async with engines(1, port=side_channel, block_count=12, block_size=8) as (engine,):
        prompts = [[number * 100 + place for place in range(20)] for number in range(1, 5)]
        answers = await asyncio.gather(*(run(engine, p, max_tokens=40, ignore_eos=True) for p in prompts))
        assert [answer for answer, _ in answers] == [truth(p, 40) for p in prompts]
        assert engine.stats().preemptions > 0
        await all_free(engine)


async def test_a_handoff_is_read_and_then_freed(side_channel: int) -> None:
    async with engines(port=side_channel) as (p, d):
        handoff = await prefill(p, TURN)
        assert handoff["remote_num_tokens"] == len(TURN)
        assert p.ledger()["retained"]["handoff"]["sets"] == 1
        answer, _ = await decode(d, TURN, handoff)
        assert answer == truth(TURN)
        await all_free(p)
        reads = d.ledger()["reads"]["handoff"]
        assert (reads["started"], reads["completed"], reads["failed"]) == (1, 1, 0)
        assert d.stats().external_tokens == len(TURN)


async def test_a_retained_set_saves_the_prefill_engine_the_conversation(side_channel: int) -> None:
    async with engines(port=side_channel) as (p, d):
        answer, handle = await decode(d, TURN, await prefill(p, TURN))
        assert handle["remote_num_tokens"] == len(TURN) + len(answer) - 1
        assert p.reset_prefix_cache()
        second = [*TURN, *answer, 5, 6, 7]
        handoff = await prefill(p, second, handle)
        assert p.stats().external_tokens == handle["remote_num_tokens"]
        again, _ = await decode(d, second, handoff)
        assert again == truth(second)
        assert p.ledger()["reads"]["claimed"]["completed"] == 1
        assert p.ledger()["wrong_reads_used"] == d.ledger()["reads_of_freed"] == 0


async def test_an_engine_is_read_and_told_at_the_host_of_its_side_channel(side_channel: int) -> None:
    async with engines(port=side_channel, side_channel_host="127.0.0.2") as (p, d):
        answer, handle = await decode(d, TURN, await prefill(p, TURN))
        assert handle["remote_host"] == "127.0.0.2"
        assert p.reset_prefix_cache(), "the hand-off is freed: P was told that it was read"
        second = [*TURN, *answer, 5, 6, 7]
        again, _ = await decode(d, second, await prefill(p, second, handle))
        assert again == truth(second)
        assert p.ledger()["reads"]["claimed"]["completed"] == 1


async def test_a_handle_of_another_conversation_changes_the_text_and_poisons_the_prefix_cache(
    side_channel: int,
) -> None:
    async with engines(port=side_channel, lease_s=0.5) as (p, d):
        _, handle = await decode(d, TURN, await prefill(p, TURN))
        edited = [1, *TURN[1:], 5, 6, 7]
        wrong, _ = await run(p, edited, {**handle, "do_remote_decode": True}, ignore_eos=True)
        assert wrong != truth(edited)
        assert p.ledger()["wrong_reads_used"] == 1
        poisoned, _ = await run(p, edited, ignore_eos=True)
        assert poisoned != truth(edited), "the same prompt later, without any handle, is wrong too"
        await eventually(p.reset_prefix_cache)
        healed, _ = await run(p, edited, ignore_eos=True)
        assert healed == truth(edited)


async def test_a_handle_that_is_used_twice_reads_freed_blocks_and_both_are_counted(side_channel: int) -> None:
    async with engines(port=side_channel) as (p, d):
        answer, handle = await decode(d, TURN, await prefill(p, TURN))
        second = [*TURN, *answer, 5]
        for _ in range(2):
            await eventually(p.reset_prefix_cache)
            await decode(d, second, await prefill(p, second, handle))
        ledger = d.ledger()
        assert ledger["reads"]["claimed"]["served"] == 2
        assert ledger["second_reads"] == 1
        assert ledger["reads"]["claimed"]["of_freed"] == 1


async def test_a_handle_that_has_expired_is_declined_and_one_without_its_deadline_is_not(side_channel: int) -> None:
    async with engines(port=side_channel, ttl_s=5.0) as (p, d):
        answer, handle = await decode(d, TURN, await prefill(p, TURN))
        second = [*TURN, *answer, 5]
        p.reset_prefix_cache()
        with pytest.raises(LoadFailedError):
            await prefill(p, second, handle)
        assert p.ledger()["reads"]["claimed"]["failed"] == 1
        await all_free(p)
        right, _ = await run(p, second, ignore_eos=True)
        assert right == truth(second), "blocks of a failed read are not cached"
        p.reset_prefix_cache()
        await prefill(p, second, {**handle, "remote_blocks_expiry_time": None})
        assert p.ledger()["reads"]["claimed"]["completed"] == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"remote_engine_id": "another"}, id="another engine at that port"),
        pytest.param({"remote_block_ids": [[*range(1, 10), 10**6]]}, id="a block that does not exist"),
    ],
)
async def test_a_handoff_that_cannot_be_read_fails_the_request(side_channel: int, change: dict[str, object]) -> None:
    async with engines(port=side_channel) as (p, d):
        handoff = await prefill(p, TURN)
        with pytest.raises(LoadFailedError):
            await decode(d, TURN, {**handoff, **change})
        await all_free(d)


async def test_too_little_to_read_is_computed_but_frees_the_set_all_the_same(side_channel: int) -> None:
    async with engines(port=side_channel, recompute_threshold=64) as (p, d):
        answer, handle = await decode(d, TURN, await prefill(p, TURN))
        second = [*TURN, *answer, 5]
        await prefill(p, second, handle)
        assert p.ledger()["reads"]["claimed"]["started"] == 0
        await all_free(d)


async def test_a_turn_that_is_labelled_and_nothing_else_is_pinned_for_ever(side_channel: int) -> None:
    async with engines(1, port=side_channel, ttl_s=0.05) as (engine,):
        await run(engine, TURN, {"label": "of somebody"}, ignore_eos=True)
        await eventually(lambda: engine.ledger()["pinned"] == 1)
        await asyncio.sleep(0.2)
        assert engine.ledger()["pinned"] == 1
        assert not engine.reset_prefix_cache()


@pytest.mark.parametrize("early", [True, False], ids=["planned before its end is known", "planned after"])
async def test_a_turn_that_ends_by_a_stop_token_counts_a_step_that_was_planned_already(
    side_channel: int, early: bool
) -> None:
    async with engines(port=side_channel, async_scheduling=early) as (p, d):
        stop = frozenset([truth(TURN)[2]])
        answer, last = await run(d, TURN, await prefill(p, TURN), ignore_eos=True, stop_token_ids=stop)
        assert last.kv_transfer_params is not None
        assert last.kv_transfer_params["remote_num_tokens"] == len(TURN) + 2 + early
        p.reset_prefix_cache()
        second = [*TURN, *answer, 5]
        await prefill(p, second, last.kv_transfer_params)
        assert p.ledger()["wrong_reads_used"] == 0, "the step has been computed by the time that anybody reads"


@pytest.mark.parametrize("spare", [0, 1], ids=["that fills its block", "that leaves a slot free"])
async def test_a_conversation_goes_on_right_after_a_stop_token(side_channel: int, spare: int) -> None:
    async with engines(1, port=side_channel) as (engine,):
        for begin in range(len(TURN)):
            answer = truth(prompt := TURN[begin:], 3)
            if (len(prompt) + len(answer) + spare) % engine.options.block_size == 0:
                break
        ended, _ = await run(engine, prompt, ignore_eos=True, stop_token_ids=frozenset(answer[2:]))
        assert ended == answer
        # Somebody else's blocks come between.
        await run(engine, [token + 7 for token in prompt], ignore_eos=True)
        again, _ = await run(engine, [*prompt, *answer, 5, 6], ignore_eos=True)
        assert again == truth([*prompt, *answer, 5, 6])


async def test_what_nobody_reads_is_freed_at_its_deadline(side_channel: int) -> None:
    async with engines(port=side_channel, ttl_s=0.2, lease_s=0.2) as (p, d):
        handoff = await prefill(p, TURN)
        await all_free(p)
        await eventually(lambda: p.ledger()["retained"]["handoff"]["leases"] == 0)
        # Too late for a hand-off, and nothing says so: vLLM reads what is there.
        await decode(d, TURN, handoff)
        await all_free(d)


async def test_a_client_that_leaves_frees_its_blocks_and_leaves_no_handle(side_channel: int) -> None:
    async with engines(1, port=side_channel, decode_step_s=0.005) as (engine,):
        asked = Request(request_id="r", prompt=TURN, max_tokens=500, ignore_eos=True, kv_transfer_params={"label": "l"})
        async with contextlib.aclosing(engine.generate(asked)) as outputs:
            async for _ in outputs:
                break
        await all_free(engine)
        assert engine.stats().finished == {"abort": 1}


async def test_a_client_that_leaves_after_the_end_changes_nothing(side_channel: int) -> None:
    async with engines(port=side_channel) as (p, _):
        asked = Request(request_id="r", prompt=TURN, max_tokens=3, ignore_eos=True, kv_transfer_params=dict(PREFILL))
        async with contextlib.aclosing(p.generate(asked)) as outputs:
            await anext(outputs)
            await eventually(lambda: p.ledger()["retained"]["handoff"]["leases"] == 1)
        await run(p, TURN)
        assert p.ledger()["retained"]["handoff"]["sets"] == 1


async def test_a_read_fails_when_the_holder_goes_away(side_channel: int) -> None:
    async with engines(1, port=side_channel) as (d,):
        async with engines(1, port=side_channel + 1) as (p,):
            handoff = await prefill(p, TURN)
            asked = Request(request_id="r", prompt=TURN, kv_transfer_params=dict(handoff), read_block_s=0.05)
            reading = asyncio.create_task(anext(d.generate(asked)))
            await eventually(lambda: p.ledger()["reads"]["handoff"]["served"] == 1)
        with pytest.raises(LoadFailedError):
            await reading
        with pytest.raises(LoadFailedError):
            await decode(d, TURN, handoff)
        await all_free(d)


async def test_a_client_that_leaves_during_a_read_frees_both_sides(side_channel: int) -> None:
    async with engines(port=side_channel) as (p, d):
        handoff = await prefill(p, TURN)
        asked = Request(request_id="r", prompt=TURN, kv_transfer_params=dict(handoff), read_block_s=0.01)
        reading = asyncio.create_task(anext(d.generate(asked)))
        await eventually(lambda: p.ledger()["reads"]["handoff"]["served"] == 1)
        reading.cancel()
        await asyncio.wait([reading])
        assert d.stats().blocks_free < d.stats().blocks, "a read that goes on keeps the blocks that it writes"
        await all_free(d)
        await all_free(p)


async def test_a_slow_read_copies_what_is_in_memory_when_each_blocks_turn_comes(side_channel: int) -> None:
    async with engines(port=side_channel, lease_s=0.05) as (p, d):
        handoff = await prefill(p, TURN)
        asked = Request(request_id="r", prompt=TURN, kv_transfer_params=dict(handoff), read_block_s=0.05)
        reading = asyncio.create_task(anext(d.generate(asked)))
        await eventually(lambda: p.ledger()["reads"]["handoff"]["served"] == 1)
        await all_free(p)
        await run(p, range(3000, 3000 + 255 * 32 - 20), max_tokens=1)
        await reading
        assert d.ledger()["wrong_reads_used"] == 1
        assert p.ledger()["reads"]["handoff"]["of_freed"] == 1


async def test_an_engine_dies_of_a_handle_with_fewer_blocks_than_are_to_be_read(side_channel: int) -> None:
    async def short_handle() -> None:
        async with engines(port=side_channel) as (p, d):
            _, handle = await decode(d, TURN, await prefill(p, TURN))
            await eventually(p.reset_prefix_cache)
            short = {**handle, "remote_block_ids": [handle["remote_block_ids"][0][:2]]}
            with pytest.raises(EngineDeadError, match="blocks to read"):
                await prefill(p, [*TURN, 5, 6], short)
            with pytest.raises(EngineDeadError):
                await run(p, TURN)

    with pytest.raises(AssertionError, match="blocks to read"):
        await short_handle()


async def test_an_engine_dies_of_a_notification_that_names_a_request_which_still_runs(side_channel: int) -> None:
    async def notified_early() -> None:
        async with engines(1, port=side_channel, decode_step_s=0.005) as (engine,):
            asked = Request(
                request_id="r", prompt=TURN, max_tokens=7000, ignore_eos=True, kv_transfer_params=dict(PREFILL)
            )
            outputs = engine.generate(asked)
            await anext(outputs)
            (running,) = engine._scheduler.running
            with contextlib.closing(
                await asyncio.to_thread(NixlPeer, notifications, "127.0.0.1", side_channel)
            ) as peer:
                await asyncio.to_thread(peer.release, running.request_id)
            with pytest.raises(EngineDeadError, match="freed while it runs"):
                _ = [output async for output in outputs]

    with pytest.raises(AssertionError, match="freed while it runs"):
        await notified_early()


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [pytest.param([], 1, id="no prompt"), pytest.param([1] * 9000, 1, id="too long"), pytest.param([1], 0, id="none")],
)
async def test_a_request_that_can_never_run_is_refused(side_channel: int, prompt: list[int], max_tokens: int) -> None:
    async with engines(1, port=side_channel) as (engine,):
        with pytest.raises(ValueError, match=r"prompt|max_tokens"):
            await run(engine, prompt, max_tokens=max_tokens)
