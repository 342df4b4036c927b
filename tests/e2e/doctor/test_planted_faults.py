"""Each fault that was planted in the stack is named by `doctor`, with the node that has it and what to do."""

import pytest

from backhaul_local.stack import Stack
from tests.e2e.doctor.conftest import Findings, Run

PLANTED = [
    # check, subject, what it says, what the fix names
    ("connector-missing", "decode-2", "No connector of the decode engine", "BACKHAUL_AGENT_SOCKET="),
    ("bidirectional-off", "decode-3", "bidirectional_kv_xfer", '"bidirectional_kv_xfer": true'),
    ("agent-unreachable", "decode-2", "does not answer at 127.0.0.1:1", "--advertise"),
    ("block-sizes-differ", "decode-4", "block size 16 here, 32 at prefill-1", "--block-size"),
    ("side-channel-local", "decode-4", "'127.0.0.1'", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    # Of the same making: its agent is said to be on another machine.
    ("engine-url-local", "decode-4", "no other machine can", "--advertise-engine-url"),
    ("nixl-missing", "decode-4", "without NIXL", "requirements-nixl.txt"),
    ("ttl-too-short", "decode-4", "decoder_kv_blocks_ttl is 8 s", '"decoder_kv_blocks_ttl": 480'),
    ("clock-skew", "decode-4", "does not run like its agent's", "clock source"),
    ("kv-events-missing", "decode-3", "KV events", "--kv-events"),
    ("etcd-slow", "etcd", "reads take", "fast disk"),
    ("template-drops-history", "model backhaul-demo", "tokens cannot be reused", "--chat-template"),
]


@pytest.mark.parametrize(("check", "subject", "what", "fix"), PLANTED, ids=[row[0] for row in PLANTED])
def test_a_planted_fault_is_named_with_where_it_is_and_what_to_do(
    findings: Findings, check: str, subject: str, what: str, fix: str
) -> None:
    found = [one for one in findings if one["check"] == check]
    assert len(found) == 1
    assert found[0]["subject"].startswith(subject)
    assert what in found[0]["what"]
    assert fix in found[0]["fix"]


def test_nothing_else_is_found(findings: Findings) -> None:
    # The etcd that comes from a Python package is such a version.
    assert {one["check"] for one in findings} == {row[0] for row in PLANTED} | {"etcd-version"}


def test_the_template_is_told_by_the_tokens_that_it_costs_and_where_prompts_part(findings: Findings) -> None:
    (found,) = (one["what"] for one in findings if one["check"] == "template-drops-history")
    assert "agrees with only 101 of the 376 tokens" in found
    assert "275 tokens cannot be reused" in found
    assert "<think>" in found


def test_people_read_the_same_and_the_command_ends_with_6(backhaul: Run, findings: Findings) -> None:
    answer = backhaul("doctor")
    assert answer.code == 6
    for one in findings:
        assert one["check"] in answer.text
        assert one["what"].split()[0] in answer.text
    assert "looked at 1 registry and 5 nodes" in answer.text


def test_a_registry_that_is_gone_beside_another_is_a_warning(faulty_stack: Stack, backhaul: Run) -> None:
    answer = backhaul("doctor", "--json", "--registry", f"127.0.0.1:1,{faulty_stack.registries[0]}")
    gone = [one for one in answer.document if one["check"] == "registry-unreachable"]
    assert [(one["subject"], one["severity"]) for one in gone] == [("registry 127.0.0.1:1", "warning")]
