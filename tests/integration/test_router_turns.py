"""Whole turns over real sockets: lookups, claims, registries and nodes that come and go."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backhaul.registry.v1 import registry_pb2
from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from backhaul_common.grpc_client import open_channel
from backhaul_connector.anchors import AnchorChain
from backhaul_router.core.body import Endpoint, parse_body
from backhaul_router.core.lookup import keys_of
from tests.fakes.directory import FakeDirectory
from tests.fakes.engine import FakeEngine, Step, bare_500, hang, refuse
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_for, router_stack
from tests.unit.router.test_tenants import FILE


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def label_key(*contents: str) -> str:
    """Returns the chain key under which a chat turn is labelled."""
    body = parse_body(Endpoint.CHAT, msgspec.json.encode(chat_body(*contents)))
    return keys_of(body, None).own


async def test_a_first_turn_is_cold_and_labelled_for_the_next(stack: RouterStack) -> None:
    got = await stack.chat("hi", stream=True)
    assert (got.status, got.route, got.miss) == (200, "cold", "first_turn")
    (decode,) = stack.decode.legs
    assert decode.params is not None
    assert decode.params["backhaul"]["keys"] == [label_key("hi")]
    assert decode.params["remote_engine_id"] == stack.prefill.engine_id


async def test_the_next_turn_reads_what_the_first_left(stack: RouterStack) -> None:
    stack.hold(tokens=128)
    stack.publish(label_key("hi"))
    got = await stack.chat("hi", "hello", "more", stream=True)
    assert (got.status, got.route, got.miss) == (200, "warm", "")
    assert got.headers["x-backhaul-prompt-tokens"] == "200"
    assert got.headers["x-backhaul-read-tokens"] == "128"
    (prefill,), (decode,) = stack.prefill.legs, stack.decode.legs
    assert prefill.params is not None
    assert decode.params is not None
    sent = {name: prefill.params[name] for name in ("do_remote_decode", "do_remote_prefill", "remote_request_id")}
    assert sent == {"do_remote_decode": True, "do_remote_prefill": False, "remote_request_id": "set-1"}
    assert prefill.params["remote_blocks_expiry_time"] == 123.5
    assert decode.params["remote_engine_id"] == stack.prefill.engine_id
    await stack.told()
    assert stack.owner.returned == []
    assert stack.owner.claims[0].weights_digest == "weights"


async def test_a_handle_that_was_not_spent_goes_back_to_its_owner(stack: RouterStack) -> None:
    """A title request under the same session does not cost the conversation its block set."""
    stack.hold()
    stack.publish(label_key("hi"))
    stack.prefill.verdict = {"read": 0, "verified": 0, "spent": False, "refused": "too_few_tokens"}
    got = await stack.chat("hi", "hello", "title please")
    assert (got.route, got.miss) == ("cold", "refused:too_few_tokens")
    await eventually(lambda: stack.owner.returned == [stack.owner.claims[0].request_id])
    stack.prefill.verdict = {}
    assert (await stack.chat("hi", "hello", "more")).route == "warm"


async def test_two_routers_with_the_same_turn_at_once_one_warm_one_cold(stack: RouterStack) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    body = chat_body("hi", "hello", "more")
    async with router_for((stack.directory.address,)) as other:
        await eventually(lambda: len(other.table) == 2)

        async def through(port: int) -> tuple[int, str, str]:
            async with stack.client.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as response:
                await response.read()
                headers = response.headers
                return response.status, headers["x-backhaul-route"], headers.get("x-backhaul-miss", "")

        got = await asyncio.gather(through(stack.router.http_port), through(other.http_port))
    assert sorted(got) == [(200, "cold", "claim:set_claimed"), (200, "warm", "")]


async def test_a_turn_through_one_router_is_found_by_another(stack: RouterStack) -> None:
    await stack.chat("hi")
    (decode,) = stack.decode.legs
    assert decode.params is not None
    label = decode.params["backhaul"]
    stack.hold()
    stack.publish(label["keys"][0], scope=label["scope"])
    async with router_for((stack.directory.address,)) as other:
        await eventually(lambda: len(other.table) == 2)
        url = f"http://127.0.0.1:{other.http_port}{CHAT}"
        async with stack.client.post(url, json=chat_body("hi", "hello", "more")) as response:
            assert response.headers["x-backhaul-route"] == "warm"


async def test_of_several_sets_the_prompts_tokens_decide(stack: RouterStack) -> None:
    chain = AnchorChain(b"i" * 16, 64)
    chain.extend(stack.prefill.tokens[:128])
    stack.hold("mine")
    stack.hold("fork")
    stack.publish(label_key("hi"), "fork", digest=b"x" * 16)
    stack.publish(label_key("hi"), "mine", digest=chain.at(128))
    assert (await stack.chat("hi", "hello", "more")).route == "warm"
    assert [claim.set_id for claim in stack.owner.claims] == ["mine"]
    (asked,) = stack.prefill.tokenized
    assert set(asked) == {"model", "messages"}


# Owners and registries that fail


async def test_an_owner_that_is_silent_costs_the_budget_and_its_claim_is_returned() -> None:
    async with router_stack(lookup_budget_s=0.15) as stack:
        stack.hold()
        stack.publish(label_key("hi"))
        stack.owner.silent = True
        began = time.monotonic()
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.route, got.miss) == (200, "cold", "lookup_timeout")
        assert time.monotonic() - began < 1
        await eventually(lambda: stack.owner.returned == [stack.owner.claims[0].request_id])


async def test_an_owner_that_refuses_says_why(stack: RouterStack) -> None:
    stack.publish(label_key("hi"))
    stack.owner.refusal = FailedPreconditionError("SET_EXPIRING", "too late")
    got = await stack.chat("hi", "hello", "more")
    assert (got.status, got.miss) == (200, "claim:set_expiring")
    await stack.told()
    assert stack.owner.returned == []


async def test_an_owner_that_is_gone_is_a_miss(stack: RouterStack) -> None:
    node = stack.directory.nodes[f"decode-{stack.decode.port}"]
    node.agent_address = "127.0.0.1:9"
    await stack.directory.put(node)
    stack.publish(label_key("hi"))
    await eventually(lambda: _agent_of(stack) == "127.0.0.1:9")
    got = await stack.chat("hi", "hello", "more")
    assert got.status == 200
    assert got.miss in ("owner_unavailable", "lookup_timeout")


def _agent_of(stack: RouterStack) -> str:
    node = stack.router.table.get(f"decode-{stack.decode.port}")
    return node.agent_address if node else ""


async def test_a_registry_that_is_silent_or_fails_is_a_miss() -> None:
    async with router_stack(lookup_budget_s=0.15) as stack:
        stack.directory.failure = UnavailableError("ETCD_UNAVAILABLE", "no quorum")
        assert (await stack.chat("hi", "hello", "more")).miss == "registry_unavailable"
        stack.directory.failure = None
        stack.directory.silent = True
        began = time.monotonic()
        assert (await stack.chat("hi", "hello", "more")).miss == "lookup_timeout"
        assert time.monotonic() - began < 1


async def test_a_registry_that_stops_does_not_stop_turns_and_the_watch_resumes(stack: RouterStack) -> None:
    await stack.directory.stop()
    for _ in range(2):
        assert (await stack.chat("hi")).status == 200
    assert (await stack.chat("hi", "hello", "more")).miss in ("registry_unavailable", "lookup_timeout")
    await stack.directory.start()
    await eventually(lambda: len(stack.directory.watches) >= 2)
    assert stack.directory.watches[-1] > 0
    await stack.add(FakeEngine("decode"))
    assert (await stack.chat("hi", "hello", "more")).miss == "not_found"


async def test_another_registry_answers_when_one_is_gone() -> None:
    async with FakeDirectory() as gone, FakeDirectory() as there:
        p, d = FakeEngine("prefill"), FakeEngine("decode")
        async with p, d, router_stack() as stack:
            await there.add(p)
            await there.add(d)
            await gone.stop()
            async with router_for((gone.address, there.address)) as router:
                await eventually(lambda: len(router.table) == 2)
                url = f"http://127.0.0.1:{router.http_port}{CHAT}"
                async with stack.client.post(url, json=chat_body("hi", "hello", "more")) as response:
                    assert response.status == 200
                    assert response.headers["x-backhaul-miss"] == "not_found"


async def test_another_registry_answers_when_one_is_full(stack: RouterStack) -> None:
    async with FakeDirectory() as other:
        await other.add(stack.prefill)
        await other.add(stack.decode, agent=stack.owner.address)
        stack.directory.failure = ResourceExhaustedError("TOO_MANY_CALLS", "full")
        async with router_for((stack.directory.address, other.address)) as router:
            await eventually(lambda: len(router.table) == 2)
            url = f"http://127.0.0.1:{router.http_port}{CHAT}"
            async with stack.client.post(url, json=chat_body("hi", "hello", "more")) as response:
                assert response.headers["x-backhaul-miss"] == "not_found"


# Nodes that come and go


async def test_ready_follows_the_nodes() -> None:
    async with router_stack(listed=False) as stack:

        async def ready() -> tuple[int, str]:
            async with stack.client.get(f"{stack.url}/ready") as response:
                return response.status, (await response.json())["reason"]

        assert (await ready())[0] == 503
        await stack.directory.add(stack.decode)
        await eventually(lambda: len(stack.router.table) == 1)
        assert await ready() == (503, "no prefill node is ready")
        await stack.directory.add(stack.prefill)
        await eventually(lambda: len(stack.router.table) == 2)
        assert await ready() == (200, "")
        await stack.lose(stack.prefill)
        assert await ready() == (503, "no prefill node is ready")
        async with stack.client.get(f"{stack.url}/health") as response:
            assert response.status == 200


async def test_a_node_that_is_not_ready_for_a_moment_keeps_its_sets(stack: RouterStack) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    node = stack.directory.nodes[f"decode-{stack.decode.port}"]
    node.state = registry_pb2.NODE_STATE_NOT_READY
    await stack.directory.put(node)
    await stack.add(FakeEngine("decode"))
    assert (await stack.chat("hi", "hello", "more")).miss == "owner_unavailable"
    node.state = registry_pb2.NODE_STATE_READY
    await stack.directory.put(node)
    await stack.add(FakeEngine("decode"), node_id="later")
    assert (await stack.chat("hi", "hello", "more")).route == "warm"


async def test_a_record_that_makes_no_sense_is_left_out_and_nothing_else(stack: RouterStack) -> None:
    await stack.directory.put(registry_pb2.Node(node_id="ghost", role=registry_pb2.ROLE_DECODE))
    await stack.directory.put(registry_pb2.Node(node_id="odd", role=registry_pb2.Role.ValueType(77)))
    await stack.add(FakeEngine("decode"))
    assert {node.node_id for node in stack.router.table}.isdisjoint({"ghost", "odd"})
    assert (await stack.chat("hi")).status == 200


async def test_an_engine_that_died_costs_no_request_that_had_no_answer_yet(stack: RouterStack) -> None:
    other = await stack.add(FakeEngine("decode"))
    await other.stop()
    assert {(await stack.chat("hi")).status for _ in range(6)} == {200}
    await other.start()


# Legs over HTTP


@pytest.mark.parametrize("step", [bare_500(), refuse(503)])
async def test_a_warm_leg_that_fails_is_repeated_cold(stack: RouterStack, step: Step) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    stack.prefill.then(step)
    got = await stack.chat("hi", "hello", "more")
    assert (got.status, got.route, got.miss) == (200, "cold", "prefill_failed")
    first, second = stack.prefill.legs
    assert first.params is not None
    assert second.params is not None
    assert (first.params["remote_request_id"], second.params["remote_engine_id"]) == ("set-1", None)


async def test_a_warm_leg_that_hangs_is_repeated_cold() -> None:
    async with router_stack(warm_prefill_timeout_s=0.3) as stack:
        stack.hold()
        stack.publish(label_key("hi"))
        stack.prefill.then(hang())
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.miss) == (200, "prefill_failed")
        await eventually(stack.prefill.legs[0].closed_early.is_set)


@pytest.mark.parametrize("fallback", ["strict", "decode"])
async def test_without_a_prefill_node_the_policy_decides(fallback: str) -> None:
    async with router_stack(prefill_fallback=fallback) as stack:
        await stack.lose(stack.prefill)
        got = await stack.chat("hi")
        if fallback == "strict":
            assert (got.status, got.headers["retry-after"]) == (503, "1")
        else:
            assert (got.status, got.headers["x-backhaul-fallback"]) == (200, "decode")


async def test_stock_engines_are_served_cold() -> None:
    prefill, decode = FakeEngine("prefill", connector=False), FakeEngine("decode", connector=False)
    async with router_stack(prefill=prefill, decode=decode) as stack:
        stack.publish(label_key("hi"))
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.route, got.miss) == (200, "cold", "no_connector")
        assert got.headers["x-backhaul-prompt-tokens"] == "200"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["alpha", "beta"]},
        {"prompt": "x", "prompt_logprobs": 1},
        {"prompt": "x", "echo": True, "logprobs": 1},
        {"prompt": "x", "n": 3},
    ],
)
async def test_kinds_that_crash_an_engine_that_was_handed_blocks(stack: RouterStack, body: dict[str, object]) -> None:
    got = await stack.post("/v1/completions", {"model": "tiny", "max_tokens": 2, **body})
    assert (got.status, got.miss) == (200, "unsupported_request")
    assert not stack.decode.crashed
    assert stack.prefill.legs == []


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "max_tokens": 500, "min_tokens": 100},
        {"max_completion_tokens": 50, "min_tokens": 20},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
async def test_a_strict_prefill_engine_accepts_what_the_client_may_send(stack: RouterStack, fields: Any) -> None:
    assert (await stack.chat("hi", **fields)).status == 200
    (decode,) = stack.decode.legs
    assert {name: decode.body[name] for name in fields} == fields


# Tenants


async def test_tenants_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(FILE)
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "engine").write_text("engine-key\n")
    async with router_stack(
        prefill=FakeEngine("prefill", api_key="engine-key"),
        decode=FakeEngine("decode", api_key="engine-key"),
        tenants_file=str(tmp_path / "tenants.toml"),
        cluster_key_file=str(tmp_path / "key"),
        engine_key_file=str(tmp_path / "engine"),
    ) as stack:
        assert (await stack.chat("hi")).status == 401
        async with stack.client.get(f"{stack.url}/v1/models") as response:
            assert response.status == 401
        for key in ("red-1", "blue-1"):
            assert (await stack.chat("hi", headers={"authorization": f"Bearer {key}"})).status == 200
        headers = {"authorization": "Bearer red-1"}
        async with stack.client.get(f"{stack.url}/v1/models", headers=headers) as response:
            assert (await response.json())["data"][0]["id"] == "tiny"
        salts = [leg.body["cache_salt"] for leg in (*stack.prefill.legs, *stack.decode.legs)]
        assert len(set(salts)) == 2
        assert salts[:2] == salts[2:]
        sent = str([leg.headers for leg in (*stack.prefill.legs, *stack.decode.legs)])
        assert "red-1" not in sent
        labels = [leg.params["backhaul"] for leg in stack.decode.legs if leg.params]
        assert labels[0]["keys"] == labels[1]["keys"]
        assert labels[0]["scope"] != labels[1]["scope"]


async def test_without_tenants_the_clients_key_goes_to_both_engines() -> None:
    prefill, decode = FakeEngine("prefill", api_key="ck"), FakeEngine("decode", api_key="ck")
    async with router_stack(prefill=prefill, decode=decode) as stack:
        headers = {"authorization": "Bearer ck"}
        assert (await stack.chat("hi", headers=headers)).status == 200
        assert (await stack.chat("hi")).status == 401
        async with stack.client.get(f"{stack.url}/v1/models", headers=headers) as response:
            assert response.status == 200


# The process


async def test_everything_works_on_ipv6() -> None:
    async with router_stack(host="::1") as stack:
        stack.hold()
        stack.publish(label_key("hi"))
        got = await stack.chat("hi", "hello", "more", stream=True)
        assert (got.status, got.route) == (200, "warm")
        async with open_channel(f"[::1]:{stack.router.grpc_port}") as channel:
            reply = await router_pb2_grpc.InferenceServiceStub(channel).ListModels(
                router_pb2.ListModelsRequest(), timeout=5
            )
        assert json.loads(reply.body)["data"][0]["id"] == "tiny"


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with router_stack() as stack:
        stack.hold()
        stack.publish(label_key("hi"))
        assert (await stack.chat("hi", "hello", "more")).route == "warm"


async def test_a_running_turn_is_finished_before_the_router_stops() -> None:
    async with router_stack(grace_s=5.0) as stack:
        async with router_for((stack.directory.address,), grace_s=5.0) as router:
            await eventually(lambda: len(router.table) == 2)
            stack.decode.chunk_gate = asyncio.Event()
            url = f"http://127.0.0.1:{router.http_port}"
            response = await stack.client.post(f"{url}{CHAT}", json=chat_body("hi", stream=True))
            assert response.status == 200
            asyncio.get_running_loop().call_later(0.3, stack.decode.chunk_gate.set)
        assert (await response.read()).endswith(b"[DONE]\n\n")
        with pytest.raises(OSError, match=r".*"):
            await stack.client.get(f"{url}/health")


async def test_a_turn_that_does_not_end_is_cut_when_the_grace_is_over() -> None:
    async with router_stack() as stack:
        began = 0.0
        async with router_for((stack.directory.address,), grace_s=0.3) as router:
            await eventually(lambda: len(router.table) == 2)
            stack.decode.chunk_gate = asyncio.Event()
            url = f"http://127.0.0.1:{router.http_port}{CHAT}"
            response = await stack.client.post(url, json=chat_body("hi", stream=True))
            began = time.monotonic()
        assert time.monotonic() - began < 3
        await eventually(stack.decode.legs[0].closed_early.is_set)
        response.close()


async def test_a_router_starts_and_stops_many_times_in_one_process() -> None:
    for _ in range(3):
        async with router_stack() as stack:
            assert (await stack.chat("hi")).status == 200


async def test_logs_tell_what_happened_and_nothing_that_was_said(
    stack: RouterStack, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"x-session-id": "../../secret-session", "authorization": "Bearer secret-key"}
    got = await stack.chat("secret words", headers=headers)
    out = "".join(capsys.readouterr())
    [line] = [line for line in out.splitlines() if "first_turn" in line]
    assert got.headers["x-request-id"] in line
    assert "secret" not in out
    (lookup,) = stack.directory.lookups
    assert all(set(key) <= set("0123456789abcdef") for key in lookup.keys)
    assert "secret" not in json.dumps(list(lookup.keys))


@pytest.mark.parametrize("token", [2**31, 10**30])
async def test_tokens_that_no_model_has_are_for_the_engine_to_refuse(stack: RouterStack, token: int) -> None:
    for set_id in ("set-1", "set-2"):
        stack.hold(set_id)
    await stack.post("/v1/completions", {"model": "tiny", "prompt": "once"}, {"x-session-id": "s1"})
    key = stack.directory.lookups[-1].keys[-1]
    for set_id in ("set-1", "set-2"):
        stack.publish(key, set_id, token_count=128, stride=64, identity=b"i" * 16, digest=b"d" * 16)
    stack.prefill.then(refuse(400, "token id is out of vocabulary"))
    got = await stack.post("/v1/completions", {"model": "tiny", "prompt": [token] * 300}, {"x-session-id": "s1"})
    assert (got.status, json.loads(got.body)["error"]["message"]) == (400, "token id is out of vocabulary")
