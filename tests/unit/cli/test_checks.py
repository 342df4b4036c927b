"""What each check finds in a snapshot, and what it does not."""

import itertools
from typing import Any

import pytest

from backhaul_cli.core.doctor import diagnose, stops_reuse
from backhaul_cli.core.finding import Severity
from backhaul_cli.core.snapshot import Agent, Clock, EngineSetup, Nixl, Node, Router, Snapshot
from backhaul_router.core.tensor_parallel import reads
from tests.fakes.cluster_seen import ANSWER, PROMPT, agent, cluster, engine, etcd, node, probe, registry


def lacking(problem: str) -> Snapshot:
    return cluster(node("prefill-1"), with_engine("decode-1", reuse=False, reuse_problem=problem))


def with_engine(name: str, **facts: Any) -> Node:
    return node(name, engines=(engine(name, **facts),))


def with_setup(name: str, **facts: Any) -> Snapshot:
    return cluster(agents={name: agent(name, EngineSetup(**facts))})


def with_agent(name: str, **facts: Any) -> Snapshot:
    return cluster(agents={name: agent(name, **facts)})


def with_etcd(**facts: Any) -> Snapshot:
    return cluster(registries=(registry(etcd=etcd(**facts)),))


def unlike(**facts: Any) -> Snapshot:
    return cluster(node("prefill-1"), with_engine("decode-1", **facts))


# check, severity, subject; what it says and what the fix names, in part
CASES = {
    "no registry": (
        cluster(registries=(registry(problem="refused", etcd=None, clock=None),), nodes=None),
        ("registry-unreachable", "error", "registry 10.0.0.1:7100", "refused", "--registry"),
    ),
    "one of two registries": (
        cluster(registries=(registry(), registry(address="10.0.0.9:7100", problem="refused", etcd=None, clock=None))),
        ("registry-unreachable", "warning", "registry 10.0.0.9:7100", "refused", "--registry"),
    ),
    "no decode node": (cluster(node("prefill-1")), ("no-decode-node", "error", "cluster", "decode", "--role decode")),
    "no prefill node": (
        cluster(node("decode-1")),
        ("no-prefill-node", "error", "cluster", "prefill", "--role prefill"),
    ),
    "a node that is not ready": (
        cluster(node("prefill-1", state="not-ready", state_reason="no answer"), node("decode-1")),
        ("node-not-ready", "error", "prefill-1", "no answer", "--engine-url"),
    ),
    "a node that drains": (
        cluster(node("prefill-1"), node("decode-1", state="draining", state_reason="draining: 3 requests run")),
        ("node-draining", "warning", "decode-1", "3 requests run", "restart its agent"),
    ),
    "an agent that does not answer": (
        cluster(agents={"decode-1": Agent(problem="timed out")}),
        ("agent-unreachable", "error", "decode-1", "timed out", "--advertise"),
    ),
    "an agent that refuses": (
        cluster(agents={"decode-1": Agent(problem="not you", refused=True)}),
        ("agent-refuses", "note", "decode-1", "not you", "--tls-callers"),
    ),
    "an agent that is too old": (
        cluster(agents={"decode-1": Agent(too_old=True)}),
        ("agent-too-old", "note", "decode-1", "too old", "Upgrade"),
    ),
    "an agent at loopback": (
        cluster(node("prefill-1"), node("decode-1", agent_address="127.0.0.1:7201")),
        ("agent-address-local", "error", "decode-1", "127.0.0.1:7201", "--advertise"),
    ),
    "an engine at loopback": (
        cluster(node("prefill-1"), node("decode-1", engine_url="http://localhost:8200")),
        ("engine-url-local", "error", "decode-1", "localhost", "--advertise-engine-url"),
    ),
    "an engine at loopback whose agent is not": (
        cluster(
            agents={"decode-1": agent("decode-1", engine_url_problem="routers are told ...")},
            registries=(registry(address="127.0.0.1:7100"),),
        ),
        ("engine-url-local", "error", "decode-1", "http://10.0.0.2:8200", "--advertise-engine-url"),
    ),
    "a router that is not ready": (
        cluster(router=Router(url="http://r", not_ready="no usable pair")),
        ("router-not-ready", "error", "router http://r", "no usable pair", "--registry"),
    ),
    "a router that does not answer": (
        cluster(router=Router(url="http://r", problem="refused"), templates=()),
        ("router-unreachable", "note", "router http://r", "not tried", "--router"),
    ),
    "no engine": (
        cluster(node("prefill-1"), node("decode-1", engines=())),
        ("no-engine", "error", "decode-1", "knows no engine", "--side-channel"),
    ),
    "no connector on D": (
        unlike(connector_version="", reuse=False, second_chance=False),
        ("connector-missing", "error", "decode-1", "not retained", "BACKHAUL_AGENT_SOCKET=/run/backhaul/decode-1.sock"),
    ),
    "no connector, and second chances": (
        unlike(connector_version="", reuse=False, second_chance=True),
        ("connector-missing", "warning", "decode-1", "only second chances", "kv_connector_module_path"),
    ),
    "no connector on P": (
        cluster(with_engine("prefill-1", connector_version="", reuse=False), node("decode-1")),
        ("connector-missing", "error", "prefill-1", "cannot prove", "kv_connector_module_path"),
    ),
    "bidirectional off": (
        lacking('set "bidirectional_kv_xfer": true in kv_connector_extra_config'),
        ("bidirectional-off", "error", "decode-1", "bidirectional", "AND decode"),
    ),
    "recompute after failures": (
        lacking('set "kv_load_failure_policy": "fail" in --kv-transfer-config'),
        ("load-failure-policy", "error", "decode-1", "kv_load_failure_policy", '"fail"'),
    ),
    "a side channel at localhost": (
        lacking("peers reach it at 'localhost': set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine"),
        ("side-channel-local", "error", "decode-1", "localhost", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    ),
    "a connector that is away": (
        lacking("the engine's connector is not connected"),
        ("connector-away", "error", "decode-1", "not connected", "--connector-socket"),
    ),
    "another problem": (lacking("moonlight"), ("reuse-off", "error", "decode-1", "moonlight", "docs/engines.md")),
    "no NIXL": (
        with_agent("decode-1", nixl=Nixl.MISSING),
        ("nixl-missing", "warning", "decode-1", "without NIXL", "requirements-nixl.txt"),
    ),
    "no KV events": (
        cluster(
            node("prefill-1"),
            with_engine("decode-1", second_chance=False),
            agents={"decode-1": agent("decode-1", kv_events=False)},
        ),
        ("kv-events-missing", "warning", "decode-1", "second chances", "--kv-events"),
    ),
    "another connector": (
        unlike(connector_version="0.2.0"),
        ("versions-differ", "error", "decode-1", "0.2.0 here, 0.1.0", "same connector"),
    ),
    "another vLLM": (
        unlike(vllm_version="0.31.0", compatibility_hash="other"),
        ("versions-differ", "error", "decode-1", "0.31.0 here, 0.32.0 at prefill-1", "same vLLM"),
    ),
    "another vLLM with a long version": (
        unlike(vllm_version="0.33.0.dev17+g1234567.cpu", compatibility_hash="other"),
        ("versions-differ", "error", "decode-1", "0.33.0.dev17+g1234567.cpu here", "same vLLM"),
    ),
    "another block size": (
        unlike(block_size=16),
        ("block-sizes-differ", "error", "decode-1", "16 here, 32 at prefill-1", "--block-size"),
    ),
    "other weights": (
        unlike(weights_digest="other"),
        ("weights-differ", "error", "decode-1", "other here, same-weights", "--revision"),
    ),
    "weights whose names begin alike": (
        cluster(
            with_engine("prefill-1", weights_digest="llama-3.3-70b, of May"),
            with_engine("decode-1", weights_digest="llama-3.3-70b, of June"),
        ),
        ("weights-differ", "error", "decode-1", "of June here, llama-3.3-70b, of May at", "--revision"),
    ),
    "digests of which the beginning is shown": (
        cluster(
            with_engine("prefill-1", weights_digest="0123456789abcdef"),
            with_engine("decode-1", weights_digest="fedcba9876543210"),
        ),
        ("weights-differ", "error", "decode-1", "fedcba987654 here, 0123456789ab at", "--revision"),
    ),
    "sizes that do not divide": (
        cluster(with_engine("prefill-1", tp_size=4), with_engine("decode-1", tp_size=6)),
        ("tensor-parallel-differs", "error", "decode-1", "size 6 here, 4", "divides"),
    ),
    "more ranks than KV heads on one side": (
        cluster(
            with_engine("prefill-1", tp_size=2, kv_head_count=4), with_engine("decode-1", tp_size=8, kv_head_count=4)
        ),
        ("tensor-parallel-differs", "error", "decode-1", "size 8 here, 2", "KV heads"),
    ),
    "another layout": (
        unlike(compatibility_hash="other"),
        ("layouts-differ", "error", "decode-1", "other here", "--kv-cache-dtype"),
    ),
    "another model": (
        cluster(node("prefill-1"), node("decode-1", models=("n",))),
        ("models-differ", "error", "decode-1", "n here, m there", "--served-model-name"),
    ),
    "blocks gone before they can be renewed": (
        with_setup("decode-1", retention_problem="decoder_kv_blocks_ttl is 8 s"),
        ("ttl-too-short", "error", "decode-1", "is 8 s", '"decoder_kv_blocks_ttl": 480'),
    ),
    "a prefill lease below three of D's heartbeats": (
        with_setup("prefill-1", lease_s=89),
        ("prefill-lease-short", "warning", "prefill-1", "89 s", '"kv_lease_duration" to 90'),
    ),
    "a clock that runs unevenly": (
        with_setup("decode-1", clock_known=False, clock_jump_count=7),
        ("clock-skew", "error", "decode-1", "7 times", "clock source"),
    ),
    "a clock that jumped once": (
        with_setup("decode-1", clock_jump_count=1),
        ("clock-jumped", "warning", "decode-1", "once", "restart vLLM"),
    ),
    "a clock that is not known yet": (
        with_setup("decode-1", clock_known=False),
        ("engine-clock-unknown", "warning", "decode-1", "not known yet", "Ask again"),
    ),
    "a time of day that is not the others'": (
        with_agent("decode-1", clock=Clock(ahead_s=-90.0, uncertainty_s=0.01)),
        ("time-of-day-skew", "warning", "decode-1", "90.0 s behind", "chrony"),
    ),
    "slow reads": (with_etcd(read_s=0.06), ("etcd-slow", "warning", "etcd 10.0.0.1:2379", "reads take 60 ms", "disk")),
    "slow writes": (
        with_etcd(write_s=0.2),
        ("etcd-slow", "warning", "etcd 10.0.0.1:2379", "writes take 200 ms", "disk"),
    ),
    "a full etcd": (with_etcd(full=True), ("etcd-full", "error", "etcd 10.0.0.1:2379", "NOSPACE", "disarm")),
    "a corrupt etcd": (with_etcd(corrupt=True), ("etcd-corrupt", "error", "etcd 10.0.0.1:2379", "CORRUPT", "member")),
    "a nearly full etcd": (
        with_etcd(size_bytes=1900 * 2**20),
        ("etcd-quota", "warning", "etcd 10.0.0.1:2379", "1900 of 2048 MiB", "--quota-backend-bytes"),
    ),
    "an etcd that keeps all revisions": (
        with_etcd(compacted=False, revision=200_000),
        ("etcd-never-compacted", "warning", "etcd 10.0.0.1:2379", "200,000", "--auto-compaction-retention"),
    ),
    "an etcd that may lose data": (
        with_etcd(version="3.5.1"),
        ("etcd-version", "warning", "etcd 10.0.0.1:2379", "lose data", "3.5.7"),
    ),
    "an etcd that is too old": (
        with_etcd(version="3.4.3"),
        ("etcd-version", "warning", "etcd 10.0.0.1:2379", "older", "3.4.23"),
    ),
    "an etcd that does not answer": (
        cluster(registries=(registry(etcd=None, clock=None, etcd_problem="no quorum"),)),
        ("etcd-unreachable", "error", "registry 10.0.0.1:7100", "no quorum", "--etcd-endpoints"),
    ),
    "a registry that is too old": (
        cluster(registries=(registry(etcd=None, clock=None, etcd_problem="too old", too_old=True),)),
        ("registry-too-old", "note", "registry 10.0.0.1:7100", "too old", "Upgrade"),
    ),
    "a template that drops reasoning": (
        cluster(templates=(probe(kind="an answer with reasoning", following=(*PROMPT, 7, 8, 9)),)),
        ("template-drops-history", "warning", "model m", "drops what the answer thought", "keep reasoning"),
    ),
    "a template that changes answers": (
        cluster(templates=(probe(following=(*PROMPT, *ANSWER[:10], 7, 8, 9)),)),
        ("template-drops-history", "warning", "model m", "changes an answer", "keep reasoning"),
    ),
    "a template that begins anew": (
        cluster(templates=(probe(following=(*PROMPT[:4], 7, 8, 9)),)),
        (
            "template-drops-history",
            "warning",
            "model m",
            "writes the beginning of the conversation anew",
            "only appends",
        ),
    ),
    "a template that could not be tried": (
        cluster(templates=(), template_problems=("m: 404",)),
        ("template-not-tried", "note", "chat template", "404", "--key-file"),
    ),
}


@pytest.mark.parametrize(("seen", "expected"), CASES.values(), ids=list(CASES))
def test_a_fault_is_found_with_where_it_is_and_what_to_do(seen: Snapshot, expected: tuple[str, ...]) -> None:
    check, severity, subject, what, fix = expected
    findings = [finding for finding in diagnose(seen) if finding.check != "no-pair"]
    assert [(one.check, one.severity.value, one.subject) for one in findings] == [(check, severity, subject)]
    assert what in findings[0].what
    assert fix in findings[0].fix


NO_ADDRESSES: list[dict[str, Any]] = [
    {"agent_address": "::1:7201"},
    {"agent_address": "decode-1"},
    {"engine_url": "http://[::1"},
    {"engine_url": "http://[fe80::1%eth0]:8200"},
    {"engine_url": "decode-1"},
]
"""What agents may have said, of whichever version: registries take any text."""


@pytest.mark.parametrize("facts", NO_ADDRESSES, ids=lambda facts: "".join(facts.values()))
def test_what_is_no_address_keeps_nothing_else_from_being_found(facts: dict[str, Any]) -> None:
    seen = cluster(
        node("prefill-1"),
        node("decode-1", **facts),
        agents={"decode-1": Agent(problem="no such address"), "prefill-1": agent("prefill-1", kv_events=False)},
        registries=(registry(etcd=etcd(full=True)),),
    )
    assert {one.check for one in diagnose(seen)} == {"etcd-full", "agent-unreachable"}


WELL = {
    "a cluster that is well": cluster(),
    "a cluster on one machine": cluster(
        node("prefill-1", agent_address="127.0.0.1:7201", engine_url="http://127.0.0.1:8100"),
        node("decode-1", agent_address="127.0.0.1:7202", engine_url="http://[::1]:8200"),
        registries=(registry(address="127.0.0.1:7100"),),
    ),
    "two versions side by side": cluster(
        node("prefill-1"),
        node("decode-1"),
        with_engine("prefill-2", connector_version="0.2.0", block_size=16),
        with_engine("decode-2", connector_version="0.2.0", block_size=16),
    ),
    "engines of which little is known": cluster(
        with_engine("prefill-1", compatibility_hash="", weights_digest="", tp_size=0), node("decode-1")
    ),
    "sizes of which one divides the other": cluster(
        with_engine("prefill-1", tp_size=2), with_engine("decode-1", tp_size=8)
    ),
    "as many ranks as KV heads": cluster(
        with_engine("prefill-1", tp_size=2, kv_head_count=4), with_engine("decode-1", tp_size=4, kv_head_count=4)
    ),
    "equal sizes beyond the KV heads": cluster(
        with_engine("prefill-1", tp_size=8, kv_head_count=4), with_engine("decode-1", tp_size=8, kv_head_count=4)
    ),
    "no KV events on prefill": cluster(agents={"prefill-1": agent("prefill-1", kv_events=False)}),
    "no NIXL on prefill": cluster(agents={"prefill-1": agent("prefill-1", nixl=Nixl.MISSING)}),
    "a prefill lease of three heartbeats": with_setup("prefill-1", lease_s=90),
    "a connector that is away, and its clock with it": with_setup("decode-1", clock_known=False, connected=False),
    "a time of day within what asking took": with_agent("decode-1", clock=Clock(ahead_s=5.0, uncertainty_s=4.0)),
    "a young etcd": with_etcd(compacted=False, revision=5_000),
    "a large etcd with a larger quota": cluster(
        registries=(registry(etcd=etcd(size_bytes=3 * 2**30)),), etcd_quota_bytes=8 * 2**30
    ),
    "the oldest sound etcd 3.5": with_etcd(version="3.5.7"),
    "the etcd of Debian": with_etcd(version="3.4.23"),
    "an etcd that is newer": with_etcd(version="3.6.4"),
    "a seam that is tokenized anew": cluster(templates=(probe(following=(*PROMPT, *ANSWER[:-8], 1, 2)),)),
}


@pytest.mark.parametrize("seen", WELL.values(), ids=list(WELL))
def test_nothing_is_found_where_nothing_is_wrong(seen: Snapshot) -> None:
    assert diagnose(seen) == []


def test_where_no_engine_has_a_partner_that_is_said_once_for_all() -> None:
    findings = diagnose(unlike(block_size=16))
    assert [(one.check, one.subject) for one in findings] == [
        ("no-pair", "cluster"),
        ("block-sizes-differ", "decode-1"),
    ]


def test_a_prefill_engine_without_a_partner_is_named_beside_one_that_has_some() -> None:
    seen = cluster(node("prefill-1"), with_engine("prefill-2", block_size=16), node("decode-1"))
    assert [(one.check, one.subject) for one in diagnose(seen)] == [("block-sizes-differ", "prefill-2")]


@pytest.mark.parametrize(
    ("prefill", "decode", "heads"), list(itertools.product((0, 1, 2, 3, 4, 8), (0, 1, 2, 4, 8), (0, 1, 2, 4)))
)
def test_sizes_with_which_routers_do_not_let_both_read_are_found_and_no_others(
    prefill: int, decode: int, heads: int
) -> None:
    seen = cluster(
        with_engine("prefill-1", tp_size=prefill, kv_head_count=heads), with_engine("decode-1", tp_size=decode)
    )
    fit = reads(decode, prefill, heads) and reads(prefill, decode, heads)
    assert ("tensor-parallel-differs" in {one.check for one in diagnose(seen)}) is not fit


def test_two_registries_that_see_the_same_of_one_etcd_say_it_once() -> None:
    slow = etcd(write_s=1.0)
    seen = cluster(registries=(registry(etcd=slow), registry(address="10.0.0.9:7100", etcd=slow)))
    assert [one.check for one in diagnose(seen)] == ["etcd-slow"]


def test_a_machine_whose_own_clock_is_wrong_is_named_and_not_all_the_others() -> None:
    late = Clock(ahead_s=60.0, uncertainty_s=0.01)
    agents = {name: agent(name, clock=late) for name in ("prefill-1", "decode-1")}
    seen = cluster(agents=agents, registries=(registry(clock=late),))
    assert [(one.check, one.subject) for one in diagnose(seen)] == [("time-of-day-skew", "this machine")]


def test_what_a_template_costs_is_counted_in_tokens() -> None:
    (found,) = diagnose(cluster(templates=(probe(following=(*PROMPT, 7, 8, 9)),)))
    assert "agrees with only 100 of the 200 tokens" in found.what
    assert "100 tokens cannot be reused" in found.what


def test_a_rank_is_named_where_a_node_has_several() -> None:
    ranks = (engine("decode-1"), engine("decode-1", rank=1, connector_version="", reuse=False))
    assert [one.subject for one in diagnose(cluster(node("prefill-1"), node("decode-1", engines=ranks)))] == [
        "decode-1 rank 1"
    ]


def test_what_stops_reuse_comes_first_and_only_that_counts_as_a_failure() -> None:
    findings = diagnose(
        cluster(
            with_engine("prefill-1", connector_version="", reuse=False),
            node("decode-1"),
            registries=(registry(etcd=etcd(read_s=1)),),
        )
    )
    assert [one.severity for one in findings] == [Severity.ERROR, Severity.WARNING]
    assert stops_reuse(findings)
    assert not stops_reuse(findings[1:])
