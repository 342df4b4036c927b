from typing import Any

import pytest

from backhaul_common.errors import InvalidArgumentError
from backhaul_registry.core import rules
from backhaul_registry.core.model import Engine, PointerId
from tests.unit.registry.values import node, pointer


@pytest.mark.parametrize("value", ["a", "A-z_9.:x", "x" * 128])
def test_an_id_of_harmless_characters_is_accepted(value: str) -> None:
    rules.check_id(value, "f")


@pytest.mark.parametrize("value", ["", "x" * 129, "a/b", "a b", "a\n", "\n", "é", "a\0", "..\\", "%2f"])
def test_any_other_id_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ID_INVALID") as caught:
        rules.check_id(value, "f")
    assert caught.value.metadata == {"field": "f"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [([], "KEY_LIMIT"), (["k"] * 17, "KEY_LIMIT"), (["k", "k"], "KEY_REPEATED"), (["/"], "ID_INVALID")],
)
def test_a_search_needs_1_to_16_different_sound_keys(keys: list[str], reason: str) -> None:
    rules.check_keys("s", [f"k{n}" for n in range(16)])
    with pytest.raises(InvalidArgumentError, match=reason):
        rules.check_keys("s", keys)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_count": 0},
        {"token_count": -1},
        {"stride": 0},
        {"digest": bytes(15)},
        {"identity": b""},
        {"engine_id": ""},
        {"engine_id": "x" * 1025},
        {"node_id": ""},
        {"node_id": "a/b"},
        {"scope": ""},
        {"key": "a/b"},
        {"set_id": ""},
        {"set_id": "é" * 129},
        {"traceparent": "00-x"},
        {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01\n"},
    ],
    ids=str,
)
def test_a_pointer_with_a_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    rules.check_pointer(pointer())
    with pytest.raises(InvalidArgumentError):
        rules.check_pointer(pointer(**{"set_id": "a", **fields}))


def test_a_pointer_to_what_is_merely_cached_need_not_say_what_it_covers() -> None:
    rules.check_pointer(pointer(cached=True))
    rules.check_pointer(pointer(cached=True, token_count=0, digest=b"", stride=0, identity=b""))


@pytest.mark.parametrize(
    "fields", [{"token_count": -1}, {"stride": -1}, {"digest": bytes(15)}, {"identity": bytes(17)}, {"set_id": ""}],
    ids=str,
)  # fmt: skip
def test_what_it_says_must_be_sound(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        rules.check_pointer(pointer(**{"set_id": "a", "cached": True, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"node_id": ""},
        {"session": "a/b"},
        {"agent_address": ""},
        {"engine_url": ""},
        {"state_reason": "x" * 1025},
        {"models": ("",)},
        {"models": ("m",) * 257},
        {"engines": (Engine(engine_id=""),)},
        {"engines": (Engine(engine_id="e", rank=-1),)},
        {"engines": (Engine(engine_id="e", tp_size=-1),)},
        {"engines": (Engine(engine_id="e", kv_head_count=-1),)},
        {"engines": (Engine(engine_id="e", weights_digest="x" * 1025),)},
        {"engines": (Engine(engine_id="e"), Engine(engine_id="e"))},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_a_node_with_a_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    rules.check_node(node())
    with pytest.raises(InvalidArgumentError):
        rules.check_node(node(**{"session": "s", **fields}))


@pytest.mark.parametrize(("wanted_s", "ttl_s"), [(None, 10.0), (2.0, 2.0), (60.0, 60.0)])
def test_a_lease_lasts_as_long_as_wanted(wanted_s: float | None, ttl_s: float) -> None:
    assert rules.lease_ttl_s(wanted_s) == ttl_s


@pytest.mark.parametrize("wanted_s", [0.0, 1.9, 60.1, -1.0])
def test_a_lease_outside_the_limits_is_refused(wanted_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="TTL_INVALID"):
        rules.lease_ttl_s(wanted_s)


@pytest.mark.parametrize(("wanted", "size"), [(0, 500), (1, 1), (5000, 5000)])
def test_a_page_has_the_wanted_size(wanted: int, size: int) -> None:
    assert rules.page_size(wanted) == size


def test_a_batch_has_at_most_1000_of_each() -> None:
    removals = [PointerId("s", "k", str(n)) for n in range(1001)]
    rules.check_batch((), removals[:1000])
    with pytest.raises(InvalidArgumentError, match="BATCH_LIMIT"):
        rules.check_batch((), removals)
