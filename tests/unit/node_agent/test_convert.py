"""What is taken over from a connector, and what is not."""

from typing import Any

import msgspec
import pytest

from backhaul_node_agent import convert
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.second_chance import cached_pointer
from tests.fakes.connector import report

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_pointers_carry_the_last_anchor() -> None:
    held = report(deadline=1.0, token_count=200, keys=["key-a", "key-b", "key-a"])
    pointers = convert.pointers(convert.block_set(held), node_id="node-1", engine_id="engine-1")
    assert [pointer.key for pointer in pointers] == ["key-a", "key-b"]
    assert {(pointer.digest, pointer.identity) for pointer in pointers} == {(held.anchors[-16:], held.identity)}


@pytest.mark.parametrize(
    ("said", "published"), [(TRACEPARENT, TRACEPARENT), ("", ""), ("nonsense", ""), (f"{TRACEPARENT}\n", "")]
)
def test_pointers_name_the_turn_that_left_the_blocks_and_nothing_else_in_its_place(said: str, published: str) -> None:
    held = convert.block_set(report(deadline=1.0, traceparent=said))
    (pointer,) = convert.pointers(held, node_id="node-1", engine_id="engine-1")
    (cached,) = convert.pointers(_cached(held), node_id="node-1", engine_id="engine-1")
    assert (pointer.traceparent, cached.traceparent) == (published, published)


def _cached(held: BlockSet) -> BlockSet:
    pointer = cached_pointer(held)
    assert pointer is not None
    return pointer


@pytest.mark.parametrize(
    "changes",
    [
        {"set_id": ""},
        {"set_id": "a,b"},
        {"set_id": "HB:a"},
        {"set_id": "x" * 257},
        {"set_id": "a:1"},
        {"set_id": "a\0"},
        {"set_id": "a\nb"},
        {"deadline": 1e300},
        {"deadline": -1e300},
        {"deadline": float("nan")},
        {"token_count": 2**31},
        {"stride": 2**40},
        {"spacing": 2**40},
        {"block_count": -5},
        {"block_count": 2**50},
        {"scope": "a/b"},
        {"scope": ""},
        {"keys": ["fine", "../../x"]},
        {"keys": ["x" * 129]},
        {"identity": b"short"},
        {"anchors": b""},
        {"anchors": b"a" * 16},
        {"spacing": 32},
        {"token_count": 0, "anchors": b"a" * 16},
        {"stride": 0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_set_that_cannot_be_managed_or_published_is_not_taken_over(changes: dict[str, Any]) -> None:
    sound = report(deadline=1.0)
    with pytest.raises(ValueError, match=r"."):
        convert.block_set(msgspec.structs.replace(sound, **changes))
