"""`BlockSetService` over real gRPC: the contract of agent.proto."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.grpc_client import to_error
from backhaul_connector import wire
from backhaul_node_agent.core.engine_clock import SAMPLES_TO_TRUST
from backhaul_node_agent.core.life import Limits
from tests.contract.owner_node import OwnerNode, owner_node
from tests.fakes.eventually import eventually
from tests.fakes.log_lines import log_lines


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[OwnerNode]:
    async with owner_node(tmp_path, claim_ttl_s=20, drain_s=0.2) as running:
        yield running


async def test_a_reported_set_is_published_under_every_key_and_can_be_claimed_once(node: OwnerNode) -> None:
    node.connector.retain(keys=["key-a", "key-b"])
    await node.published()
    assert node.registry.keys_of("set-1") == {"key-a", "key-b"}

    grant = await node.claim()

    assert grant.token_count == 100
    assert 15 < grant.ttl.seconds < 20
    assert await node.refusal(request_id="request-2") == "SET_CLAIMED"
    await node.unpublished()


async def test_what_is_logged_of_a_claim_names_the_routers_trace(node: OwnerNode, spans: InMemorySpanExporter) -> None:
    node.connector.retain()
    await node.published()
    with log_lines("agent") as lines:
        with trace.get_tracer("test").start_as_current_span("turn") as turn:
            await node.claim()
            await node.refusal(request_id="request-2")
        named = trace.format_trace_id(turn.get_span_context().trace_id)
        assert lines.traces("claim granted", "claim refused") == dict.fromkeys(
            ("claim granted", "claim refused"), named
        )


async def test_a_grant_carries_vllms_fields_the_claims_deadline_and_the_proof(node: OwnerNode) -> None:
    held = node.connector.retain()
    await node.published()

    before = node.connector.now
    params = json.loads((await node.claim()).kv_transfer_params_json)

    assert params["remote_block_ids"] == [[1, 2, 3, 4]]
    assert params["remote_request_id"] == "set-1"
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert before + 18 < params["remote_blocks_expiry_time"] <= node.connector.now + 20
    assert params["backhaul"] == {
        "scope": "scope-1",
        "identity": held.identity.hex(),
        "stride": 64,
        "spacing": 64,
        "token_count": 100,
        "anchors": held.anchors.hex(),
    }


async def test_a_grant_names_the_engines_side_channel_as_the_engine_did(node: OwnerNode) -> None:
    held = node.connector.retain()
    await node.published()
    node.connector.free("set-1")
    await node.unpublished()
    # Another network than HTTP's, and the port of rank 1.
    where = {"remote_host": "192.0.2.7", "remote_port": 5602}
    node.connector.retain("set-2", params={**held.params, **where, "remote_request_id": "set-2"})
    await node.published("set-2")
    params = json.loads((await node.claim("set-2")).kv_transfer_params_json)
    assert {name: params[name] for name in where} == where


async def test_the_connector_knows_of_the_claim_before_the_router_does(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    await node.claim()
    await eventually(lambda: node.connector.count(wire.Claimed) == 1)
    assert node.connector.sets["set-1"].claimed


async def test_a_claim_repeated_with_its_request_id_gets_the_same_grant(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    first, second = await node.claim(), await node.claim()
    assert first.kv_transfer_params_json == second.kv_transfer_params_json


async def test_a_request_id_names_one_block_set(node: OwnerNode) -> None:
    node.connector.retain("set-1")
    node.connector.retain("set-2")
    await node.published("set-2")
    await node.claim("set-1")
    assert await node.refusal("set-2") == "REQUEST_ID_REUSED"


async def test_a_returned_set_is_published_and_granted_again(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    await node.claim()
    await node.unpublished()

    await node.stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id="request-1"), timeout=2)

    await node.published()
    assert await node.refusal(request_id="request-1") == "CLAIM_RETURNED"
    await node.claim(request_id="request-2")
    assert node.connector.count(wire.Returned) == 1


async def test_a_claim_that_comes_after_its_return_is_refused(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    await node.stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id="request-1"), timeout=2)
    assert await node.refusal(request_id="request-1") == "CLAIM_RETURNED"
    await node.claim(request_id="request-2")


async def test_a_freed_set_is_unknown_and_not_found_any_more(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    node.connector.free("set-1")
    await node.unpublished()
    assert await node.refusal() == "SET_UNKNOWN"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"set_id": "other"}, "SET_UNKNOWN"),
        ({"engine_id": "engine-0"}, "SET_UNKNOWN"),
        ({"scope": "scope-2"}, "SET_UNKNOWN"),
        ({"weights_digest": "other"}, "WEIGHTS_MISMATCH"),
        ({"weights_digest": ""}, "WEIGHTS_MISMATCH"),
        ({"request_id": ""}, "REQUEST_ID"),
        ({"request_id": "x" * 129}, "REQUEST_ID"),
    ],
)
async def test_a_claim_that_does_not_fit_is_refused(node: OwnerNode, changes: dict[str, str], reason: str) -> None:
    node.connector.retain()
    await node.published()
    assert await node.refusal(**changes) == reason


async def test_a_set_that_is_about_to_expire_is_refused(node: OwnerNode) -> None:
    node.connector.retain(ttl_s=7.5)
    await node.published()
    assert await node.refusal() == "SET_EXPIRING"


async def test_nothing_is_granted_while_the_connector_is_away(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    await node.connector.close()
    await eventually(lambda: not node.record.engines[0].reuse)
    assert await node.refusal() == "CONNECTOR_AWAY"

    await node.connector.connect()
    await node.ready()
    await node.claim(request_id="request-2")


async def test_nothing_is_granted_once_the_lease_is_lost_until_the_node_joined_again(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    node.registry.taken = True
    node.registry.lose_lease()
    node.registry.break_joins()
    await eventually(lambda: not node.registry.pointers)
    assert await node.refusal() == "LEASE_INVALID"

    node.registry.taken = False
    # The connection went to whoever might have taken the node over.
    await node.connector.close()
    await node.connector.connect()
    await node.ready()
    await node.published()
    await node.claim(request_id="request-2")


async def test_ids_that_are_not_the_owners_are_reported_and_left_alone(node: OwnerNode) -> None:
    await eventually(lambda: _can_release(node))
    node.connector.retain()
    await node.published()
    ids = ["foreign", "set-1", "set-1"]
    released = await node.stub.ReleaseBlockSets(agent_pb2.ReleaseBlockSetsRequest(set_ids=ids), timeout=2)
    assert (list(released.released), list(released.unknown)) == (["set-1"], ["foreign"])
    renewed = await node.stub.RenewBlockSets(agent_pb2.RenewBlockSetsRequest(set_ids=ids), timeout=2)
    assert (list(renewed.renewed), list(renewed.unknown)) == (["set-1"], ["foreign"])


async def test_finished_turns_beyond_their_share_of_the_engines_blocks_are_released(tmp_path: Path) -> None:
    async with owner_node(tmp_path, retained_share=0.005, retention_policy="lru") as node:
        await eventually(lambda: _can_release(node))
        node.connector.retain("set-1")
        await node.published()
        node.connector.retain("set-2", block_ids=[4, 5, 6, 7])
        await node.becomes(agent_pb2.BLOCK_SET_STATE_RELEASING)
        assert await node.state("set-2") == agent_pb2.BLOCK_SET_STATE_HELD


async def test_what_runs_and_waits_pushes_finished_turns_out(tmp_path: Path) -> None:
    async with owner_node(tmp_path, retention_policy="lru") as node:
        await eventually(lambda: _can_release(node))
        node.connector.retain("set-1", ended_at=node.connector.now - 9.0)
        node.connector.retain("set-2", block_ids=[4, 5, 6, 7])
        await node.published("set-2")
        # Of 1,000 blocks 7 are pinned and 100 must stay free.
        node.connector.send(wire.Memory(free_count=104, waiting_count=6))
        await node.becomes(agent_pb2.BLOCK_SET_STATE_RELEASING)
        assert await node.state("set-2") == agent_pb2.BLOCK_SET_STATE_HELD


async def test_a_newer_turn_supersedes_the_one_that_it_continues(node: OwnerNode) -> None:
    await eventually(lambda: _can_release(node))
    node.connector.retain("older", token_count=200)
    node.connector.retain("title", token_count=200, identity=b"o" * 16)
    await node.published("title")
    continues = ["key-of-title", "key-of-older"]
    node.connector.retain("newer", token_count=300, continues=continues, block_ids=[1, 2, 3, 4, 5])

    await node.becomes(agent_pb2.BLOCK_SET_STATE_RELEASING, "older")
    await node.unpublished("older")
    assert await node.states() == {
        "older": agent_pb2.BLOCK_SET_STATE_RELEASING,
        "title": agent_pb2.BLOCK_SET_STATE_HELD,
        "newer": agent_pb2.BLOCK_SET_STATE_HELD,
    }


async def test_only_what_the_registry_never_takes_over_is_released_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backhaul_node_agent.app.Limits", partial(Limits, unpublished_s=1.0))
    async with owner_node(tmp_path) as node:
        await eventually(lambda: _can_release(node))
        node.connector.retain("found")
        await node.published("found")
        await asyncio.sleep(1.5)
        assert await node.state("found") == agent_pb2.BLOCK_SET_STATE_HELD

        node.registry.acknowledging.clear()
        node.connector.retain("lost")
        await node.becomes(agent_pb2.BLOCK_SET_STATE_RELEASING, "lost")
        assert await node.state("found") == agent_pb2.BLOCK_SET_STATE_HELD
        node.registry.acknowledging.set()


async def test_a_hand_off_is_freed_by_its_name_and_nothing_else_is(node: OwnerNode) -> None:
    await eventually(lambda: _can_release(node))
    node.connector.retain("set-1")
    await node.published()
    engine_id = node.connector.greeting.engine_id

    async def refusal(engine_id: str, hand_off_id: str) -> str:
        request = agent_pb2.ReleaseHandOffRequest(engine_id=engine_id, hand_off_id=hand_off_id)
        try:
            await node.stub.ReleaseHandOff(request, timeout=2)
        except grpc.aio.AioRpcError as error:
            return to_error(error).reason
        return ""

    assert await refusal(engine_id, "cmpl-7") == ""
    assert await refusal(engine_id, "set-1") == "NOT_A_HAND_OFF"
    assert await refusal("another", "cmpl-7") == "ENGINE_UNKNOWN"
    for odd in ("", "HB:a,b", "a,b", "a:1", ":", "\0", "a\nb", "x" * 513, "é" * 257):
        assert await refusal(engine_id, odd) == "HAND_OFF_ID"
    assert await node.states() == {"set-1": agent_pb2.BLOCK_SET_STATE_HELD}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "SET_IDS"),
        ({"set_ids": ["x"] * 1001}, "SET_IDS"),
        ({"set_ids": ["x"] * 1001, "keys": ["key"]}, "SET_IDS"),
        ({"keys": ["key"] * 17}, "KEYS"),
    ],
    ids=["nothing", "ids", "ids-with-keys", "keys"],
)
async def test_a_release_names_something_and_not_too_much(node: OwnerNode, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.stub.ReleaseBlockSets(agent_pb2.ReleaseBlockSetsRequest(**asked), timeout=2)
    assert (caught.value.code(), to_error(caught.value).reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


async def test_keys_name_only_what_no_pointer_leads_to(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    (held,) = (await node.stub.ListBlockSets(agent_pb2.ListBlockSetsRequest(), timeout=2)).block_sets
    request = agent_pb2.ReleaseBlockSetsRequest(keys=held.keys, scope=held.scope)
    assert await node.stub.ReleaseBlockSets(request, timeout=2) == agent_pb2.ReleaseBlockSetsResponse()
    assert await node.state() == agent_pb2.BLOCK_SET_STATE_HELD


async def test_a_claimed_set_is_released_later(node: OwnerNode) -> None:
    await eventually(lambda: _can_release(node))
    node.connector.retain()
    await node.published()
    await node.claim()
    answer = await node.stub.ReleaseBlockSets(agent_pb2.ReleaseBlockSetsRequest(set_ids=["set-1"]), timeout=2)
    assert list(answer.deferred) == ["set-1"]
    assert await node.state() == agent_pb2.BLOCK_SET_STATE_CLAIMED
    await node.stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id="request-1"), timeout=2)
    assert await node.state() == agent_pb2.BLOCK_SET_STATE_RELEASING


async def test_listings_come_in_pages_by_set_id(node: OwnerNode) -> None:
    for number in range(5):
        node.connector.retain(f"set-{number}")
    await node.published("set-4")
    seen, token = [], ""
    while True:
        request = agent_pb2.ListBlockSetsRequest(page_size=2, page_token=token)
        page = await node.stub.ListBlockSets(request, timeout=2)
        seen.append([held.set_id for held in page.block_sets])
        if not (token := page.next_page_token):
            break
    assert seen == [["set-0", "set-1"], ["set-2", "set-3"], ["set-4"]]


async def test_a_listing_of_named_sets_has_those_that_are_there(node: OwnerNode) -> None:
    for number in range(3):
        node.connector.retain(f"set-{number}")
    await node.published("set-2")
    request = agent_pb2.ListBlockSetsRequest(set_ids=["set-2", "elsewhere", "set-0"], page_size=2)
    page = await node.stub.ListBlockSets(request, timeout=2)
    assert [held.set_id for held in page.block_sets] == ["set-0", "set-2"]
    assert not page.next_page_token
    too_many = agent_pb2.ListBlockSetsRequest(set_ids=[str(number) for number in range(1001)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.stub.ListBlockSets(too_many, timeout=2)
    assert to_error(caught.value).reason == "SET_IDS"


@pytest.mark.parametrize("token", ["ééé", "a", "/w==", "YQ"])
async def test_a_page_token_of_nobodys_making_is_refused(node: OwnerNode, token: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.stub.ListBlockSets(agent_pb2.ListBlockSetsRequest(page_token=token), timeout=2)
    assert (caught.value.code(), to_error(caught.value).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN")


async def test_a_listing_shows_the_confirmed_time_left(node: OwnerNode) -> None:
    node.connector.retain(ttl_s=100)
    await node.published()
    node.connector.confirm("set-1", node.connector.now + 200)

    async def shown() -> bool:
        listing = await node.stub.ListBlockSets(agent_pb2.ListBlockSetsRequest(), timeout=2)
        return bool(190 < listing.block_sets[0].remaining_ttl.seconds <= 200)

    await eventually(shown)


async def test_a_set_with_a_deadline_that_no_clock_shows_does_not_spoil_the_listing(node: OwnerNode) -> None:
    node.connector.retain("set-1")
    node.connector.retain("set-2", ttl_s=1e300)
    node.connector.retain("set-3")
    await node.published("set-3")
    assert list(await node.states()) == ["set-1", "set-3"]
    node.connector.confirm("set-1", 1e300)
    await eventually(lambda: node.connector.cut)
    assert list(await node.states()) == ["set-1", "set-3"]


async def test_a_listing_goes_on_after_an_engines_clock_jumped(node: OwnerNode) -> None:
    node.connector.retain()
    await node.published()
    node.connector.clock_offset += 100_000
    await node.becomes(agent_pb2.BLOCK_SET_STATE_RELEASING)
    pings = node.connector.count(wire.Ping)
    await eventually(lambda: node.connector.count(wire.Ping) > pings + SAMPLES_TO_TRUST)
    listing = await node.stub.ListBlockSets(agent_pb2.ListBlockSetsRequest(), timeout=2)
    assert [held.remaining_ttl.seconds for held in listing.block_sets] == [0]


async def test_a_drained_node_says_so_grants_nothing_and_removes_its_pointers(node: OwnerNode) -> None:
    node.connector.retain("set-1")
    node.connector.retain("set-2")
    await node.published("set-2")
    await node.claim("set-2", request_id="request-2")

    answer = await node.stub.Drain(agent_pb2.DrainRequest(), timeout=2)

    assert answer.remaining_count == 2
    await node.unpublished()
    assert await node.refusal() == "DRAINING"
    assert await node.states() == {
        "set-1": agent_pb2.BLOCK_SET_STATE_RELEASING,
        "set-2": agent_pb2.BLOCK_SET_STATE_CLAIMED,
    }
    await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_DRAINING and node.record.retiring)


def _can_release(node: OwnerNode) -> bool:
    return bool(node.app.can_notify)
