from typing import Any

import pytest
import structlog.testing

from backhaul_common.etcd import KeyValue
from backhaul_registry import convert
from backhaul_registry.core.model import Engine, PointerId
from backhaul_registry.keys import Keys
from backhaul_registry.records import Records
from tests.unit.registry.values import node, pointer

KEYS = Keys("c")


def kv(key: bytes, value: bytes, revision: int = 1) -> KeyValue:
    return KeyValue(key, value, 1, revision, 0)


def test_what_is_written_is_read_back() -> None:
    records = Records(KEYS)
    engine = Engine(
        engine_id="e",
        rank=1,
        compatibility_hash="c",
        weights_digest="w",
        block_size=16,
        block_count=9,
        retention_ttl_s=480.25,
        connector_version="1",
        reuse=True,
        reuse_problem="p",
        vllm_version="v",
        second_chance=True,
        fenced=True,
        tp_size=4,
        kv_head_count=8,
    )
    one = node(engines=(engine,), models=("m", "n"), state_reason="r", retiring=True)
    assert records.read_node(kv(KEYS.node("d1"), records.write_node(one))) == one
    named = pointer("named", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    for two in (pointer("a/b"), named, pointer("c", cached=True, token_count=0, digest=b"", stride=0, identity=b"")):
        assert records.read_pointer(kv(KEYS.pointer(two.id), records.write_pointer(two))) == two


def test_a_pointer_of_before_there_were_second_chances_is_read() -> None:
    records = Records(KEYS)
    written = records.write_pointer(pointer("a"))
    assert b"cached" not in written
    found = records.read_pointer(kv(KEYS.pointer(pointer("a").id), written))
    assert found is not None
    assert not found.cached


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x03\x0a", id="version"),
        pytest.param(b"\x01\xff\xff", id="garbage"),
        pytest.param(b"\x01", id="no fields"),
        pytest.param(Records(KEYS).write_node(node(agent_address="")), id="field missing"),
        pytest.param(Records(KEYS).write_node(node(node_id="d2")), id="other key"),
    ],
)
def test_what_cannot_be_read_counts_as_absent_and_is_logged_once(value: bytes) -> None:
    records = Records(KEYS)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert records.read_node(kv(KEYS.node("d1"), value)) is None
        assert records.read_pointer(kv(KEYS.pointer(PointerId("s", "k", "x")), value)) is None
    assert [log["log_level"] for log in logs] == ["warning"] * 2


def test_a_pointer_is_what_its_key_says_and_its_value_does_not_say_it_again() -> None:
    records, one = Records(KEYS), pointer("a set", scope="some-scope", key="some-key")
    written = records.write_pointer(one)
    assert not any(text in written for text in (b"some-scope", b"some-key", b"a set"))
    found = records.read_pointer(kv(KEYS.lookup("s2", "k2") + b"b", written))
    assert found is not None
    assert found.id == PointerId("s2", "k2", "b")


@pytest.mark.parametrize("said", ["scope", "key", "set_id"])
def test_a_pointer_whose_value_says_what_its_key_says_counts_as_absent(said: str) -> None:
    records, one = Records(KEYS), pointer("a")
    message = convert.facts_to_proto(one)
    setattr(message, said, getattr(one, said))
    with structlog.testing.capture_logs() as logs:
        assert records.read_pointer(kv(KEYS.pointer(one), b"\x02" + message.SerializeToString())) is None
    assert len(logs) == 1


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"/c/index/s/k", id="too short"),
        pytest.param(b"/c/index/s/k/a/b", id="too long"),
        pytest.param(b"/d/index/s/k/a", id="another cluster's"),
        pytest.param(b"/c/index/s/k/%61", id="not as it is written"),
        pytest.param(b"/c/index/s/k/%FF", id="no text"),
        pytest.param(b"/c/index/s/\xff/a", id="no text at all"),
        pytest.param(b"/c/index/s/k/", id="no set"),
    ],
)
def test_a_pointer_under_a_key_that_no_pointer_has_counts_as_absent(key: bytes) -> None:
    with structlog.testing.capture_logs() as logs:
        records = Records(KEYS)
        assert records.read_pointer(kv(key, records.write_pointer(pointer("a")))) is None
    assert len(logs) == 1


def test_a_new_unreadable_value_is_logged_anew_and_memory_is_bounded() -> None:
    records = Records(KEYS)
    with structlog.testing.capture_logs() as logs:
        for revision in range(3000):
            records.read_node(kv(KEYS.node("d1"), b"", revision))
    assert len(logs) == 3000
    assert len(records._logged) == 1000


@pytest.mark.parametrize(
    ("set_id", "key"),
    [
        ("a", b"/c/index/s/k/a"),
        ("a/b", b"/c/index/s/k/a%2Fb"),
        ("../x", b"/c/index/s/k/..%2Fx"),
        ("\0\xe9", b"/c/index/s/k/%00%C3%A9"),
    ],
)
def test_a_set_id_cannot_leave_its_place_in_the_key(set_id: str, key: bytes) -> None:
    assert KEYS.pointer(PointerId("s", "k", set_id)) == key


def test_prefixes_end_with_a_slash() -> None:
    prefixes: list[Any] = [KEYS.nodes, KEYS.index, KEYS.scope("s"), KEYS.lookup("s", "k")]
    assert prefixes == [b"/c/nodes/", b"/c/index/", b"/c/index/s/", b"/c/index/s/k/"]
    assert KEYS.scope("") == KEYS.index
