"""What a turn does when something fails, and what it never does."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from backhaul_router import instruments
from backhaul_router.core.body import Endpoint
from backhaul_router.core.claims import KeptBlocks
from backhaul_router.core.engines import EngineError, Failure, Reply
from backhaul_router.core.errors import ApiError
from backhaul_router.core.health.circuit import BreakerSettings
from backhaul_router.core.health.pairs import APART_S
from backhaul_router.core.nodes import NodeState
from backhaul_router.core.routing.settings import DecodeSettings, RoutingSettings
from backhaul_router.core.salt import salt_for
from backhaul_router.core.tenants import parse_tenants
from backhaul_router.ports import Policy, TurnRequest
from tests.fakes.readings import Readings
from tests.unit.router.ports import (
    CLUSTER_KEY,
    PATIENCE_S,
    Bench,
    FakeStream,
    Sent,
    chat_request,
    fault,
    hand_off,
    ready,
    warm_hand_off,
)
from tests.unit.router.test_tenants import FILE

JSON = {"content-type": "application/json"}
BREAKER = BreakerSettings()
STRICT = Policy(prefill_fallback="strict")


def handed_off(leg: Sent) -> bool:
    """Tells whether a decode leg was handed blocks."""
    return "remote_block_ids" in leg.body.get("kv_transfer_params", {})


def warm_bench(**options: Any) -> Bench:
    """A bench whose turn ``a b c`` finds a block set on d1."""
    bench = Bench(**options)
    bench.publish("a")
    return bench


# The way it should go


async def test_a_cold_turn_hands_prefills_blocks_to_decode() -> None:
    bench = Bench()
    done = await bench.chat("a")
    (prefill,), (decode,) = bench.engines.prefills, bench.engines.decodes
    assert prefill.warm is False
    assert decode.body["kv_transfer_params"]["remote_host"] == "h"
    assert len(decode.body["kv_transfer_params"]["backhaul"]["keys"]) == 1
    assert done.body == b"data: [DONE]\n\n"
    assert bench.live.load.total == 0


async def test_a_warm_turn_reports_what_was_read() -> None:
    bench = warm_bench()
    done = await bench.chat("a", "b", "c")
    outcome = done.answer.outcome
    assert done.served == ("warm", "")
    assert (outcome.prompt_token_count, outcome.local_token_count, outcome.read_token_count) == (200, 16, 112)
    assert done.answer.headers["x-backhaul-read-tokens"] == "112"
    assert bench.engines.prefills[0].body["kv_transfer_params"]["backhaul"] == {"token_count": 128}
    assert bench.engines.decodes[0].body["kv_transfer_params"]["remote_block_ids"] == [[5]]
    assert bench.owner.returned == []


async def test_every_leg_and_attempt_has_its_own_request_id() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [Failure.FAULT]
    bench.engines.decode_steps = [Failure.REFUSED]
    await bench.chat("a", "b", "c", request_id="mine")
    legs = [*bench.engines.prefills, *bench.engines.decodes]
    ids = [leg.headers["x-request-id"] for leg in legs]
    assert len(legs) == len(set(ids)) == 5
    assert "mine" not in str([leg.body for leg in legs])


# What the connector says


async def test_a_claim_that_was_not_spent_is_returned() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [hand_off(refused="too_few", local=32)]
    done = await bench.chat("a", "b", "c")
    assert done.served == ("cold", "refused:too_few")
    assert bench.owner.returned == [bench.owner.claims[0].request_id]
    assert done.answer.outcome.local_token_count == 32


async def test_a_turn_whose_prefill_engine_read_nothing_is_not_called_warm() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [hand_off(local=192, read=0, verified=195, spent=True)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "not_needed")
    assert bench.owner.returned == []


async def test_a_refused_handle_that_was_spent_is_not_returned() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [hand_off(refused="late", spent=True)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "refused:late")
    assert bench.owner.returned == []


async def test_blocks_that_nobody_verified_go_no_further() -> None:
    bench = warm_bench()
    unverified = warm_hand_off().body.replace(b"backhaul", b"something")
    bench.engines.prefill_steps = [type(hand_off())(200, {}, unverified)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "no_connector")
    assert not handed_off(bench.engines.decodes[0])


@pytest.mark.parametrize("reply", [b"{}", b'{"kv_transfer_params": null}', b"garbage"])
async def test_without_a_hand_off_decode_computes_the_prompt(read: Readings, reply: bytes) -> None:
    bench = Bench()
    bench.engines.prefill_steps = [type(hand_off())(200, {}, reply)]
    done = await bench.chat("a")
    assert done.answer.status == 200
    assert not handed_off(bench.engines.decodes[0])
    assert read.counted(instruments.MISSING_HAND_OFFS) == {(): 1}


# Prefill fails


@pytest.mark.parametrize(
    "step", [Failure.FAULT, Failure.TIMEOUT, Failure.DISCONNECTED, Failure.REFUSED, fault(500), fault(503)]
)
async def test_a_warm_leg_that_fails_is_repeated_cold_once_elsewhere(step: Any) -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [step]
    done = await bench.chat("a", "b", "c")
    assert done.served == ("cold", "prefill_failed")
    first, second = bench.engines.prefills
    assert (first.warm, second.warm) == (True, False)
    assert first.node != second.node
    assert "remote_engine_id" in second.body["kv_transfer_params"]
    assert done.answer.outcome.read_token_count == 0


async def test_a_warm_leg_is_repeated_on_the_same_node_when_there_is_no_other() -> None:
    bench = warm_bench(nodes=ready("p1", "d1"))
    bench.engines.prefill_steps = [fault(500)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "prefill_failed")


async def test_a_claim_is_returned_only_when_its_handle_cannot_have_been_sent() -> None:
    for failure, returned in ((Failure.REFUSED, 1), (Failure.DISCONNECTED, 0), (Failure.TIMEOUT, 0)):
        bench = warm_bench()
        bench.engines.prefill_steps = [failure]
        await bench.chat("a", "b", "c")
        assert len(bench.owner.returned) == returned, failure


async def test_a_claim_is_returned_when_its_client_leaves_before_prefill_is_reached() -> None:
    async def silent() -> Reply:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    for reached, returned in ((False, 1), (True, 0)):
        bench = warm_bench()
        bench.engines.prefill_steps = [silent]
        if not reached:
            bench.engines.connected.clear()
        running = asyncio.ensure_future(bench.chat("a", "b", "c"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.engines.prefills
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(bench.owner.returned) == returned, reached


async def test_a_200_that_says_error_counts_as_a_failure() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [type(hand_off())(200, {}, b'{"choices": [{"finish_reason": "error"}]}')]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "prefill_failed")


@pytest.mark.parametrize("step", [Failure.REFUSED, Failure.DISCONNECTED, fault(502), fault(503), fault(504)])
async def test_a_cold_leg_that_may_work_elsewhere_is_tried_there_once(step: Any) -> None:
    bench = Bench(policy=STRICT)
    bench.engines.prefill_steps = [step]
    assert (await bench.chat("a")).answer.status == 200
    assert {leg.node for leg in bench.engines.prefills} == {"p1", "p2"}


@pytest.mark.parametrize(
    ("step", "status"), [(fault(500), 502), (Failure.FAULT, 502), (Failure.TIMEOUT, 504)], ids=["500", "fault", "late"]
)
async def test_a_cold_leg_that_fails_otherwise_is_the_clients_error(step: Any, status: int) -> None:
    bench = Bench()
    bench.engines.prefill_steps = [step]
    with pytest.raises(ApiError) as caught:
        await bench.chat("a")
    assert caught.value.status == status
    assert len(bench.engines.prefills) == 1
    assert bench.engines.decodes == []


async def test_a_leg_that_is_repeated_takes_a_new_connection() -> None:
    bench = Bench()
    bench.engines.prefill_steps = [Failure.DISCONNECTED]
    bench.engines.decode_steps = [Failure.DISCONNECTED]
    assert (await bench.chat("a")).answer.status == 200
    assert [leg.again for leg in bench.engines.prefills] == [False, True, True]
    assert [leg.again for leg in bench.engines.decodes] == [True, True]


async def test_two_failed_attempts_are_enough() -> None:
    bench = Bench(policy=STRICT)
    bench.engines.prefill_steps = [fault(503), fault(503), hand_off()]
    with pytest.raises(ApiError) as caught:
        await bench.chat("a")
    assert caught.value.status == 503
    assert caught.value.headers["retry-after"]
    assert len(bench.engines.prefills) == 2


async def test_when_all_prefill_engines_refuse_decode_computes_the_prompt_if_it_may() -> None:
    bench = Bench()
    bench.engines.prefill_steps = [fault(503), fault(503)]
    done = await bench.chat("a")
    assert done.answer.headers["x-backhaul-fallback"] == "decode"
    assert not handed_off(bench.engines.decodes[0])


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_prefills_4xx_is_the_clients_and_decode_is_not_called(status: int) -> None:
    bench = Bench()
    bench.engines.prefill_steps = [fault(status, "your fault")]
    with pytest.raises(ApiError) as caught:
        await bench.chat("a")
    assert (caught.value.status, caught.value.message) == (status, "your fault")
    assert bench.engines.decodes == []
    assert len(bench.engines.prefills) == 1


async def test_without_prefill_nodes_the_policy_decides() -> None:
    nodes = [*ready("d1"), *ready("p1", state=NodeState.NOT_READY)]
    with pytest.raises(ApiError) as caught:
        await Bench(nodes=nodes, policy=STRICT).chat("a")
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    bench = Bench(nodes=nodes)
    done = await bench.chat("a")
    assert done.answer.outcome.fallback
    assert not handed_off(bench.engines.decodes[0])


async def test_without_decode_nodes_there_is_no_capacity() -> None:
    with pytest.raises(ApiError) as caught:
        await Bench(nodes=ready("p1")).chat("a")
    assert caught.value.status == 503


# Decode fails


@pytest.mark.parametrize("step", [Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT, FakeStream(status=500)])
async def test_decode_that_fails_before_its_first_byte_costs_both_legs_again_elsewhere_cold(step: Any) -> None:
    bench = warm_bench()
    bench.engines.decode_steps = [step]
    done = await bench.chat("a", "b", "c")
    assert done.served == ("cold", "decode_failed")
    assert [leg.warm for leg in bench.engines.prefills] == [True, False]
    assert [leg.node for leg in bench.engines.decodes] == ["d1", "d2"]
    assert bench.engines.open_decodes == 0


@pytest.mark.parametrize(
    ("step", "status"), [(Failure.REFUSED, 503), (Failure.DISCONNECTED, 502), (Failure.TIMEOUT, 504)]
)
async def test_decode_is_tried_twice_at_most(step: Failure, status: int) -> None:
    bench = Bench()
    bench.engines.decode_steps = [step, step, FakeStream()]
    with pytest.raises(ApiError) as caught:
        await bench.chat("a")
    assert caught.value.status == status
    assert len(bench.engines.decodes) == 2


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (429, 1), (500, 2), (503, 2)])
async def test_decodes_error_is_passed_on(status: int, attempts: int) -> None:
    bench = Bench()
    headers = {**JSON, "Retry-After": "7", "content-length": "9", "server": "uvicorn", "content-encoding": "gzip"}
    bench.engines.decode_steps = [FakeStream(b'{"error":1}', status=status, headers=headers) for _ in range(2)]
    done = await bench.chat("a")
    assert (done.answer.status, done.body) == (status, b'{"error":1}')
    assert done.answer.headers["retry-after"] == "7"
    assert not {"content-length", "server", "content-encoding"} & set(done.answer.headers)
    assert len(bench.engines.decodes) == attempts


@pytest.mark.parametrize(
    ("nodes", "policy", "prefills"),
    [
        pytest.param(("p1", "d1"), Policy(), 1, id="no other prefill node: decode computes the prompt"),
        pytest.param(("p1", "d1"), STRICT, 2, id="unless it may not"),
        pytest.param(("p1", "p2", "d1"), Policy(), 2, id="another prefill node"),
    ],
)
async def test_the_only_decode_engine_is_asked_again_when_the_blocks_may_be_why_it_failed(
    nodes: tuple[str, ...], policy: Policy, prefills: int
) -> None:
    bench = Bench(nodes=ready(*nodes), policy=policy)
    bench.engines.decode_steps = [FakeStream(b"{}", status=500, headers=JSON)]
    assert (await bench.chat("a")).served == ("cold", "decode_failed")
    assert [leg.node for leg in bench.engines.decodes] == ["d1", "d1"]
    assert len(bench.engines.prefills) == prefills
    assert len({leg.node for leg in bench.engines.prefills}) == len(nodes) - 1


async def test_blocks_that_no_decode_engine_can_read_fail_no_turn() -> None:
    """As when the clock of the only prefill node has jumped: no deadline of its hand-offs means anything any more."""
    bench = Bench(nodes=ready("p1", "d1", "d2"))

    async def unreadable() -> FakeStream:
        if handed_off(bench.engines.decodes[-1]):
            raise EngineError(Failure.ABANDONED)
        return FakeStream()

    for _ in range(4):
        bench.engines.decode_steps = [unreadable, unreadable]
        assert (await bench.chat("a")).served == ("cold", "decode_failed")


async def test_the_only_decode_engine_is_not_asked_again_when_it_had_no_blocks() -> None:
    bench = Bench(nodes=ready("d1"))
    bench.engines.decode_steps = [FakeStream(b"{}", status=500, headers=JSON)]
    assert (await bench.chat("a")).answer.status == 500
    assert len(bench.engines.decodes) == 1


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    bench = Bench()
    bench.engines.decode_steps = [FakeStream(b"data: x\n\n", breaks=Failure.DISCONNECTED)]
    done = await bench.chat("a")
    assert done.broken is not None
    assert done.answer.outcome.result == "broken"
    assert len(bench.engines.decodes) == 1
    assert bench.live.breakers.avoided(*ready("d1"))


async def test_a_whole_answer_that_breaks_is_asked_for_once_more() -> None:
    bench = Bench()
    bench.engines.decode_steps = [FakeStream(b'{"id"', headers=JSON, breaks=Failure.DISCONNECTED)]
    done = await bench.chat("a", stream=False)
    assert done.served == ("cold", "decode_failed")
    bench.engines.decode_steps = [
        FakeStream(b'{"id"', headers=JSON, breaks=Failure.DISCONNECTED),
        FakeStream(b'{"id"', headers=JSON, breaks=Failure.DISCONNECTED),
    ]
    with pytest.raises(ApiError) as caught:
        await bench.chat("a", stream=False)
    assert caught.value.status == 502


# Blocks that could not be loaded


async def _abandoned() -> FakeStream:
    raise EngineError(Failure.ABANDONED)


WHOLE_ERROR = b'{"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}'


@pytest.mark.parametrize("step", [_abandoned, lambda: _whole_error()], ids=["stream", "whole"])
async def test_a_request_that_decode_gave_up_is_repeated_cold_on_another_pair(step: Any) -> None:
    bench = Bench()
    bench.engines.decode_steps = [step]
    done = await bench.chat("a")
    assert done.served == ("cold", "decode_failed")
    assert done.body == b"data: [DONE]\n\n"
    assert {leg.node for leg in bench.engines.decodes} == {"d1", "d2"}
    assert len(bench.engines.prefills) == 2


async def _whole_error() -> FakeStream:
    return FakeStream(WHOLE_ERROR, headers=JSON)


async def test_a_request_that_was_given_up_twice_is_a_503() -> None:
    bench = Bench()
    bench.engines.decode_steps = [_abandoned, _whole_error, _abandoned]
    with pytest.raises(ApiError) as caught:
        await bench.chat("a")
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    assert len(bench.engines.decodes) == 2
    assert bench.live.load.total == bench.engines.open_decodes == 0


async def test_a_request_that_worked_in_the_end_shows_that_the_pair_was_to_blame() -> None:
    bench = Bench()
    bench.engines.decode_steps = [_abandoned]
    await bench.chat("a")
    first, decode = bench.engines.prefills[0].node, bench.engines.decodes[0].node
    assert bench.live.pairs.apart(*ready(first, decode))
    for _ in range(8):
        await bench.chat("a")
    pairs = list(zip(bench.engines.prefills, bench.engines.decodes, strict=True))[1:]
    assert (first, decode) not in [(p.node, d.node) for p, d in pairs]


async def test_a_request_that_never_worked_blames_no_pair() -> None:
    bench = Bench()
    bench.engines.decode_steps = [_abandoned, _abandoned]
    with pytest.raises(ApiError):
        await bench.chat("a")
    assert not any(bench.live.pairs.apart(*ready(p, d)) for p in ("p1", "p2") for d in ("d1", "d2"))


async def test_a_prefill_engine_that_cannot_read_from_a_holder_is_not_asked_again_for_a_while() -> None:
    bench = warm_bench(nodes=ready("p1", "d1"))
    bench.engines.prefill_steps = [fault(500)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "prefill_failed")
    assert (await bench.chat("a", "b", "c")).served == ("cold", "pair_apart")
    assert len(bench.owner.claims) == 1
    bench.clock.now += APART_S
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")


async def test_another_prefill_engine_reads_from_that_holder_meanwhile() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [fault(500)]
    await bench.chat("a", "b", "c")
    failed = bench.engines.prefills[0].node
    for _ in range(4):
        assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert failed not in {leg.node for leg in bench.engines.prefills[2:]}


async def test_an_engine_that_was_merely_busy_is_not_blamed_for_a_read() -> None:
    bench = warm_bench(nodes=ready("p1", "d1"))
    bench.engines.prefill_steps = [fault(503)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "prefill_failed")
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")


# What counts against a node


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_errors_that_blame_the_client_count_against_nobody(status: int) -> None:
    bench = Bench(nodes=ready("p1", "d1", "d2"))
    for _ in range(10):
        bench.engines.decode_steps = [FakeStream(b"{}", status=status, headers=JSON)]
        assert (await bench.chat("a")).answer.status == status
    bench.engines.prefill_steps = [fault(status)] * 10
    for _ in range(10):
        with pytest.raises(ApiError):
            await bench.chat("a")
    assert not any(bench.live.breakers.avoided(node) for node in ready("p1", "d1", "d2"))


async def test_prefill_that_gives_up_every_request_counts_too() -> None:
    bench = Bench(nodes=ready("p1", "p2", "d1"))
    given_up = Reply(200, {}, b'{"choices": [{"finish_reason": "error"}]}')
    bench.engines.prefill_steps = [given_up] * (2 * BREAKER.faults)
    for _ in range(2 * BREAKER.faults):
        with pytest.raises(ApiError):
            await bench.chat("a")
    assert all(bench.live.breakers.avoided(node) for node in ready("p1", "p2"))


async def test_a_prompt_that_prefill_computed_in_the_end_was_no_fallback() -> None:
    bench = Bench(nodes=ready("p1", "d1", "d2"))
    bench.engines.prefill_steps = [fault(503), hand_off()]
    bench.engines.decode_steps = [Failure.DISCONNECTED]
    done = await bench.chat("a")
    assert "x-backhaul-fallback" not in done.answer.headers


async def test_a_node_that_always_fails_gets_only_probes_until_it_works() -> None:
    bench = Bench(nodes=ready("p1", "d1", "d2"), settings=RoutingSettings(decode=DecodeSettings(scorers=())))

    async def on_d1_unavailable() -> FakeStream:
        return FakeStream(b"{}", status=503 if bench.engines.decodes[-1].node == "d1" else 200, headers=JSON)

    bench.engines.decode_steps = [on_d1_unavailable] * 40
    for turn in range(10):
        assert (await bench.chat(f"a{turn}")).answer.status == 200
    asked = [leg.node for leg in bench.engines.decodes]
    assert asked.count("d1") == 1
    bench.clock.now += BREAKER.ejection_s
    for turn in range(10):
        await bench.chat(f"b{turn}")
    assert [leg.node for leg in bench.engines.decodes].count("d1") == 2
    bench.clock.now += 2 * BREAKER.ejection_s
    bench.engines.decode_steps = []
    await bench.chat("a")
    bench.clock.now += BREAKER.slow_start_s
    for turn in range(10):
        await bench.chat(f"c{turn}")
    assert [leg.node for leg in bench.engines.decodes].count("d1") > 4


# Nodes that go


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_at_a_node_that_goes_is_repeated_elsewhere(leg: str) -> None:
    bench = warm_bench()
    reached = asyncio.Event()

    async def wait() -> Any:
        reached.set()
        await asyncio.Event().wait()

    if leg == "prefill":
        bench.engines.prefill_steps = [wait]
    else:
        bench.engines.decode_steps = [wait]
    task = asyncio.create_task(bench.chat("a", "b", "c"))
    await reached.wait()
    gone = (bench.engines.prefills if leg == "prefill" else bench.engines.decodes)[0].node
    bench.table.change(ready(gone, state=NodeState.NOT_READY), [])
    bench.table.change([], [gone])
    bench.departures.look()
    done = await task
    assert done.served == ("cold", f"{leg}_failed")
    assert gone not in {sent.node for sent in (*bench.engines.prefills[1:], *bench.engines.decodes[-1:])}
    assert bench.live.load.total == 0


async def test_decode_that_waits_for_blocks_of_a_node_that_goes_gets_others() -> None:
    bench = Bench(nodes=ready("p1", "p2", "d1"))
    reached = asyncio.Event()

    async def wait() -> Any:
        reached.set()
        await asyncio.Event().wait()

    bench.engines.decode_steps = [wait]
    task = asyncio.create_task(bench.chat("a"))
    await reached.wait()
    gone = bench.engines.prefills[0].node
    bench.table.change(ready(gone, state=NodeState.NOT_READY), [])
    bench.table.change([], [gone])
    bench.departures.look()
    assert (await task).served == ("cold", "decode_failed")
    assert bench.engines.prefills[1].node != gone
    assert not bench.live.breakers.avoided(*ready("d1"))


async def test_a_leg_at_the_last_node_that_goes_is_a_503() -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    reached = asyncio.Event()

    async def wait() -> Any:
        reached.set()
        await asyncio.Event().wait()

    bench.engines.decode_steps = [wait]
    task = asyncio.create_task(bench.chat("a"))
    await reached.wait()
    bench.table.change(ready("d1", state=NodeState.NOT_READY), [])
    bench.clock.now += 0.1
    bench.departures.look()
    bench.clock.now += PATIENCE_S
    bench.departures.look()
    with pytest.raises(ApiError) as caught:
        await task
    assert caught.value.status == 503


# Hand-offs


async def test_a_hand_off_is_used_once() -> None:
    bench = Bench()
    replies = [
        Reply(200, {}, hand_off().body.replace(b'"h"', b'"first"')),
        Reply(200, {}, hand_off().body.replace(b'"h"', b'"second"')),
    ]
    bench.engines.prefill_steps = [*replies]
    bench.engines.decode_steps = [Failure.REFUSED]
    await bench.chat("a")
    hosts = [leg.body["kv_transfer_params"]["remote_host"] for leg in bench.engines.decodes]
    assert hosts == ["first", "second"]


@pytest.mark.parametrize(
    ("step", "freed"),
    [(Failure.REFUSED, 1), (Failure.DISCONNECTED, 0), (Failure.TIMEOUT, 0), (_abandoned, 0)],
    ids=["not sent", "broken", "late", "given up"],
)
async def test_a_hand_off_is_freed_only_when_decode_cannot_know_of_it(step: Any, freed: int) -> None:
    bench = Bench()
    bench.engines.decode_steps = [step]
    await bench.chat("a")
    prefill = bench.engines.prefills[0].node
    assert bench.owner.released == [KeptBlocks(f"agent-{prefill}", "pe", "ho")] * freed


async def test_a_hand_off_that_decode_reads_is_not_freed() -> None:
    bench = warm_bench()
    await bench.chat("a")
    await bench.chat("a", "b", "c")
    assert bench.owner.released == []


async def test_a_hand_off_that_must_not_be_used_is_freed() -> None:
    bench = warm_bench()
    bench.engines.prefill_steps = [Reply(200, {}, warm_hand_off().body.replace(b"backhaul", b"something"))]
    await bench.chat("a", "b", "c")
    assert len(bench.owner.released) == 1


@pytest.mark.parametrize("params", [b"null", b"{}", b'{"remote_engine_id": 1, "remote_request_id": "x"}'])
async def test_what_has_no_name_cannot_be_freed(params: bytes) -> None:
    bench = Bench()
    bench.engines.prefill_steps = [Reply(200, {}, b'{"kv_transfer_params": ' + params + b"}")]
    bench.engines.decode_steps = [Failure.REFUSED]
    await bench.chat("a")
    assert bench.owner.released == []


# Kinds of requests


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 1}, {"echo": True}, {"use_beam_search": True}])
async def test_requests_that_need_one_engine_go_to_decode_alone(fields: dict[str, Any]) -> None:
    bench = warm_bench()
    done = await bench.chat("a", "b", "c", kv_transfer_params={"do_remote_prefill": True}, **fields)
    assert done.served == ("cold", "unsupported_request")
    assert bench.engines.prefills == []
    assert bench.registry.lookups == []
    assert not handed_off(bench.engines.decodes[0])


async def test_a_turn_without_reuse_neither_looks_up_nor_leaves_anything() -> None:
    bench = warm_bench()
    done = await bench.chat("a", "b", "c", reuse=False)
    assert done.served == ("cold", "reuse_off")
    assert bench.registry.lookups == []
    assert bench.engines.decodes[0].body["kv_transfer_params"]["backhaul"]["keys"] == []


async def test_a_completion_without_a_session_leaves_nothing_either() -> None:
    bench = Bench()
    body = msgspec.json.encode({"model": "m", "prompt": "once", "stream": True})
    done = await bench.run(TurnRequest(Endpoint.COMPLETIONS, body, tenant=""))
    assert done.served == ("cold", "no_keys")
    assert bench.engines.decodes[0].body["kv_transfer_params"]["backhaul"]["keys"] == []


async def test_an_unknown_model_is_refused_before_any_leg() -> None:
    bench = Bench()
    with pytest.raises(ApiError) as caught:
        await bench.chat("a", model="x")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert bench.engines.prefills == bench.engines.decodes == []


async def test_before_the_nodes_are_known_no_model_is_unknown() -> None:
    with pytest.raises(ApiError) as caught:
        await Bench(nodes=[]).chat("a", model="x")
    assert caught.value.status == 503


# Tenants and keys


async def test_tenants_share_neither_scope_nor_salt() -> None:
    bench = Bench(tenants=parse_tenants(FILE))
    for key in ("red-1", "blue-1"):
        await bench.chat("a", "b", "c", authorization=f"Bearer {key}", cache_salt="mine")
    red, blue = (leg.body["cache_salt"] for leg in bench.engines.prefills)
    assert red == salt_for(CLUSTER_KEY, tenant="red", client_salt="mine")
    assert [leg.body["cache_salt"] for leg in bench.engines.decodes] == [red, blue]
    scopes = [scope for scope, _ in bench.registry.lookups]
    assert len({red, blue}) == len(set(scopes)) == 2
    with pytest.raises(ApiError):
        await bench.chat("a")


async def test_a_turn_whose_tenant_is_gone_by_the_time_it_begins_is_refused() -> None:
    bench = Bench(tenants=parse_tenants(FILE))
    request = replace(chat_request("a"), tenant="green")
    for begun in (bench.turns.run(request), bench.turns.forward(request)):
        with pytest.raises(ApiError) as caught:
            async with begun:
                pytest.fail("it runs")
        assert caught.value.status == 401
    assert bench.registry.lookups == []
    assert bench.engines.prefills == bench.engines.decodes == []


@pytest.mark.parametrize("role", ["user", "tool"])
async def test_tenants_do_not_name_what_engines_keep_of_media(role: str) -> None:
    bench = Bench(tenants=parse_tenants(FILE), policy=Policy(explain=True))
    part = {"type": "image_url", "image_url": None, "uuid": "somebodys"}
    messages = [{"role": "user", "content": "see"}, {"role": role, "content": [{"type": "text", "text": "x"}, part]}]
    request = replace(chat_request(messages=messages, authorization="Bearer red-1"), tenant="red")
    for ask in (bench.run, bench.turns.explain):
        with pytest.raises(ApiError, match="uuid") as caught:
            await ask(request)
        assert (caught.value.status, caught.value.param) == (400, "messages")
    assert bench.engines.prefills == bench.engines.decodes == []


async def test_without_tenants_clients_may_name_their_media() -> None:
    bench = Bench()
    part = {"type": "image_url", "image_url": None, "uuid": "mine"}
    await bench.run(chat_request(messages=[{"role": "user", "content": [part]}]))
    assert bench.engines.decodes[0].body["messages"][0]["content"] == [part]


@pytest.mark.parametrize(
    ("tenants", "engine_key", "sent"),
    [(False, "", "Bearer red-1"), (False, "ek", "Bearer ek"), (True, "", None), (True, "ek", "Bearer ek")],
)
async def test_engines_get_the_configured_key_or_the_clients_own(tenants: bool, engine_key: str, sent: str) -> None:
    bench = Bench(tenants=parse_tenants(FILE) if tenants else None, policy=Policy(engine_key=engine_key))
    await bench.chat("a", authorization="Bearer red-1")
    legs = [*bench.engines.prefills, *bench.engines.decodes]
    assert [leg.headers.get("authorization") for leg in legs] == [sent, sent]


# The client leaves


async def test_a_client_that_leaves_during_prefill_ends_the_turn() -> None:
    bench = warm_bench()
    reached = asyncio.Event()

    async def wait() -> Any:
        reached.set()
        await asyncio.Event().wait()

    bench.engines.prefill_steps = [wait]
    task = asyncio.create_task(bench.chat("a", "b", "c"))
    await reached.wait()
    assert bench.live.load.total == 2, "the leg that runs, and the one that is to come"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.engines.decodes == []
    assert bench.live.load.total == 0


async def test_a_client_that_leaves_while_decode_streams_ends_the_leg() -> None:
    bench = Bench()
    with pytest.raises(ConnectionResetError):
        await bench.leave("a")
    assert len(bench.engines.decodes) == 1
    assert bench.engines.open_decodes == 0
    assert bench.live.load.total == 0


async def test_of_a_model_with_an_endless_name_as_much_is_noted_as_people_can_read() -> None:
    bench = Bench(nodes=())
    with pytest.raises(ApiError):
        await bench.chat("a", model="m" * 100_000)
    (entry,) = bench.journal.since(0, most=1)
    assert len(entry.model) < 300
