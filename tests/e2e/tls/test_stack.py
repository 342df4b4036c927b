"""Conversations where every hop is under TLS: etcd, registry, agents, engines, router, and Envoy in front of it."""

import ssl
from collections.abc import Iterator
from contextlib import closing

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from backhaul_common.metering import OTHER
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, answered, opening
from tests.e2e.stack.conftest import eventually, eventually_warm

SERVICES = ("registry-1", "agent-prefill-1", "agent-decode-1", "router-1")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(
        state=tmp_path_factory.mktemp("tls"),
        prefill=[SimulatedEngine()],
        decode=[SimulatedEngine()],
        tls=True,
        gateway=True,
        metrics=True,
        router_flags=["--prefer", "warm", "--lookup-budget-s", "0.5"],
    )
    with Stack(options) as stack:
        yield stack


@pytest.mark.parametrize("front", ["router", "envoy"])
def test_a_conversation_reads_and_says_what_it_would_say_without_reuse_through_new_certificates_too(
    stack: Stack, front: str
) -> None:
    assert stack.tls is not None
    url = stack.gateway if front == "envoy" else stack.routers[0]
    assert url.startswith("https://")
    chat = Chat(url, tls=stack.tls.context())
    with closing(chat.http):
        eventually_warm(chat)
        messages, routes = opening(), []
        for turn in range(4):
            if turn == 2:
                _replace_certificates(stack)
            reply = chat.send(messages)
            routes.append((reply.status, reply.route))
            assert reply.text == chat.cold(messages)
            messages = answered(messages, reply.text)
    assert routes == [(200, "cold"), (200, "warm"), (200, "warm"), (200, "warm")]


def _replace_certificates(stack: Stack) -> None:
    """Returns when all services have taken them."""
    assert stack.tls is not None

    def taken() -> list[int]:
        return [(stack.logs / f"{name}.log").read_text().count("TLS files taken") for name in SERVICES]

    before = taken()
    stack.tls.replace()
    eventually(lambda: all(now > then for now, then in zip(taken(), before, strict=True)), within_s=30)


def test_what_services_count_of_a_conversation_is_read_over_tls(stack: Stack) -> None:
    assert stack.tls is not None
    chat = Chat(stack.routers[0], tls=stack.tls.context())
    with closing(chat.http):
        eventually_warm(chat)
    read = {name: _read(stack, name) for name in SERVICES}
    router, agent, registry = read["router-1"], read["agent-decode-1"], read["registry-1"]
    assert router["backhaul_router_turns_total", (stack.model_name, "ok", "warm")] >= 1
    assert router["backhaul_router_claims_total", ("granted",)] == agent["backhaul_agent_claims_total", ("granted",)]
    assert router["backhaul_router_prompt_tokens_total", ("read",)] > 0
    assert router["backhaul_router_ttft_seconds_count", ("warm",)] >= 1
    assert router["backhaul_router_nodes", ("closed",)] == 2
    assert router["backhaul_router_registry_watch", ()] == 1
    assert agent["backhaul_agent_publish_duration_seconds_count", ()] >= 1
    assert agent["backhaul_agent_block_sets_ended_total", ("read",)] >= 1
    assert 0 < agent["backhaul_agent_blocks_budget", ()] <= agent["backhaul_agent_blocks", ()]
    assert [found["backhaul_agent_ready", ()] for found in (agent, read["agent-prefill-1"])] == [1, 1]
    assert registry["backhaul_registry_nodes", ("ready",)] == 2
    assert registry["backhaul_registry_etcd_available", ()] == 1
    assert registry["backhaul_registry_lookups_total", ("found",)] >= 1
    assert registry["db_client_operation_duration_seconds_count", ("txn", "etcd", "")] >= 1
    for found in read.values():
        assert found["backhaul_tls_remaining_seconds", ("services",)] > 0
        assert {name for name, labels in found if OTHER in labels} == set()


def _read(stack: Stack, name: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Returns a service's values by name and labels' values, in the order of the labels' names."""
    assert stack.tls is not None
    with httpx2.Client(verify=stack.tls.context(), trust_env=False) as prometheus:
        text = prometheus.get(f"https://{stack.metrics[name]}/metrics").raise_for_status().text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(one.name, tuple(one.labels[label] for label in sorted(one.labels))): one.value for one in samples}


def test_nobody_is_served_without_a_certificate_or_without_tls(stack: Stack) -> None:
    assert stack.tls is not None
    stranger = ssl.create_default_context(cafile=stack.tls.ca)
    node = stack.nodes[0]
    read = [f"https://{address}" for address in stack.metrics.values()]
    for url in (stack.routers[0], stack.gateway, node.url, f"https://{stack.etcd_endpoints[0]}", *read):
        with httpx2.Client(verify=stranger, trust_env=False) as without, pytest.raises(httpx2.TransportError):
            without.get(f"{url}/health")
        with httpx2.Client(trust_env=False) as plain, pytest.raises(httpx2.TransportError):
            plain.get(f"{url.replace('https', 'http')}/health")
        with httpx2.Client(verify=stack.tls.context(), trust_env=False) as ours:
            assert ours.get(f"{url}/health").status_code in (200, 404)
