"""What a watch sends: in parts that fit into messages, and complete."""

from dataclasses import replace

import pytest

from backhaul_common.grpc_server import MAX_MESSAGE_BYTES
from backhaul_registry import convert
from backhaul_registry.core.feed import Change, Opening
from backhaul_registry.core.model import Pointer
from backhaul_registry.core.rules import check_pointer
from tests.unit.registry.values import node, pointer

LONGEST = pointer(
    "s" * 256, scope="s" * 128, key="k" * 128, engine_id="e" * 1024, node_id="n" * 128, token_count=(1 << 31) - 1
)


def longest(count: int) -> dict[str, Pointer]:
    """Returns so many pointers of the greatest length."""
    check_pointer(LONGEST)
    return {f"{number:06}": replace(LONGEST, set_id=f"{number:0256}") for number in range(count)}


def test_a_large_snapshot_comes_whole_in_messages_that_grpc_sends() -> None:
    pointers = longest(12_000)
    messages = list(convert.pointers_opening(Opening(7, 9, pointers), ""))
    assert max(message.ByteSize() for message in messages) < MAX_MESSAGE_BYTES < sum(m.ByteSize() for m in messages)
    assert [p.set_id for m in messages for p in m.snapshot.pointers] == [p.set_id for p in pointers.values()]
    assert [(m.revision, m.digest, m.more) for m in messages] == [(0, 0, True), (0, 0, True), (7, 9, False)]


def test_a_large_change_comes_whole_in_messages_that_grpc_sends() -> None:
    upserts = longest(6_000)
    removals = longest(6_000)
    messages = list(convert.pointers_change(Change(7, upserts, removals, 9), ""))
    assert max(message.ByteSize() for message in messages) < MAX_MESSAGE_BYTES
    assert sum(len(m.change.upserts) for m in messages) == sum(len(m.change.removals) for m in messages) == 6_000
    assert [(m.revision, m.more) for m in messages] == [(0, True), (0, True), (7, False)]


def test_nodes_come_in_parts_too() -> None:
    large = node(models=tuple(f"{number:0240}" for number in range(256)))
    nodes = {f"{number:03}": replace(large, node_id=f"{number:03}") for number in range(450)}
    for messages in (
        list(convert.nodes_opening(Opening(7, 9, nodes))),
        list(convert.nodes_change(Change(7, nodes, {}, 9))),
    ):
        assert max(message.ByteSize() for message in messages) < MAX_MESSAGE_BYTES
        found = [n.node_id for m in messages for n in (*m.snapshot.nodes, *m.change.upserts)]
        assert found == list(nodes)
        assert [(m.revision, m.digest, m.more) for m in messages] == [(0, 0, True), (0, 0, True), (7, 9, False)]


@pytest.mark.parametrize("scope", ["", "elsewhere"], ids=["nothing there", "nothing of the scope"])
def test_an_empty_snapshot_is_one_message(scope: str) -> None:
    (message,) = convert.pointers_opening(Opening(7, 9, longest(1) if scope else {}), scope)
    assert (message.WhichOneof("what"), message.revision, len(message.snapshot.pointers)) == ("snapshot", 7, 0)


def test_a_change_outside_the_scope_is_a_sign_of_life() -> None:
    (message,) = convert.pointers_change(Change(7, longest(1), {}, 9), "elsewhere")
    assert (message.WhichOneof("what"), message.revision, message.digest) == (None, 7, 9)
