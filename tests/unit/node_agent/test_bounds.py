"""What the agent believes of engines is what the registry takes, and no more."""

from dataclasses import replace
from typing import Any, get_type_hints

import msgspec
import pytest

from backhaul.registry.v1 import registry_pb2
from backhaul_common.errors import BackhaulError
from backhaul_connector import wire
from backhaul_node_agent import convert
from backhaul_node_agent.core import bounds
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import EngineFacts
from backhaul_node_agent.core.node import ServerFacts, SideChannelFacts, node_record
from backhaul_registry import convert as registry_convert
from backhaul_registry.core import rules
from tests.fakes.connector import hello, report
from tests.fakes.registry import check_node
from tests.unit.node_agent.owned import facts, standing

LONG = "é" * (bounds.MAX_TEXT_BYTES // 2)
"""The longest text."""
YEAR_S = 365 * 86_400.0


ODD: dict[object, list[object]] = {
    int: [-(2**63), -1, 0, 1, 65_536, 2**31 - 1, 2**31, 2**40, 10**400],
    float: [-1e300, -1.0, 0.0, 1e10, 1e12, 1e300, float("inf"), float("nan")],
    str: ["", "\0", LONG, LONG + "x", "z" * 5_000],
    bytes: [b"", b"x", b"x" * 16, b"x" * 5_000],
}
"""Values that a field of a type can have, sensible or not."""


def odd_fields(message: type[msgspec.Struct]) -> list[tuple[str, object]]:
    """Returns every field of a message with every odd value."""
    hints = get_type_hints(message)
    return [(field, value) for field in message.__struct_fields__ for value in ODD.get(hints[field], [])]


def node_of(*engines: EngineFacts, models: tuple[str, ...] = ("model-1",), **changes: Any) -> registry_pb2.Node:
    """Returns the record that the registry gets."""
    record = node_record(
        server=ServerFacts(healthy=True, models=models, version=LONG, problem=""),
        engines=engines,
        side_channels={engine.rank: SideChannelFacts(engine.engine_id, LONG, 32, 1000) for engine in engines},
        connected=[],
        advertised_host="127.0.0.1",
        purging=False,
    )
    return convert.node(
        replace(record, **changes),
        node_id="n" * 128,
        session="s" * 128,
        role="decode",
        agent_address=LONG,
        engine_url=LONG,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_id": LONG},
        {"connector_version": LONG},
        {"vllm_version": LONG},
        {"weights_digest": LONG},
        {"side_channel_host": LONG},
        {"rank": bounds.MAX_RANK},
        {"block_size": bounds.MAX_COUNT},
        {"tp_size": bounds.MAX_TP_SIZE},
        {"kv_head_count": bounds.MAX_COUNT},
        {"block_count": bounds.MAX_BLOCKS},
        {"ttl_s": YEAR_S},
        {"ttl_s": 0.0},
        {"problem": "x" * 5_000},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_registry_takes_every_hello_that_the_agent_takes(changes: dict[str, Any]) -> None:
    check_node(node_of(convert.engine_facts(hello(**changes))))


def test_an_engine_with_more_blocks_than_there_is_memory_to_count_them_is_not_taken() -> None:
    with pytest.raises(bounds.OutOfBoundsError, match="block_count"):
        convert.engine_facts(hello(block_count=bounds.MAX_BLOCKS + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_id": ""},
        {"engine_id": LONG + "x"},
        {"connector_version": LONG + "x"},
        {"vllm_version": LONG + "x"},
        {"weights_digest": "z" * 5_000},
        {"block_size": -1},
        {"block_count": -1},
        {"kv_head_count": -1},
        {"block_count": 2**40},
        {"block_size": 2**31},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_the_registry_does_not_take_the_agent_does_not_take_either(changes: dict[str, Any]) -> None:
    with pytest.raises(bounds.OutOfBoundsError):
        convert.engine_facts(hello(**changes))
    with pytest.raises((BackhaulError, ValueError)):
        check_node(node_of(replace(facts(), **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ttl_s": 1e300},
        {"ttl_s": 1e12},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"rank": -1},
        {"rank": 2**40},
        {"tp_size": 0},
        {"tp_size": 2**40},
        {"side_channel_port": 0},
        {"side_channel_port": 65_536},
        {"side_channel_host": "h" * 5_000},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_numbers_that_no_engine_has_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(bounds.OutOfBoundsError, match=next(iter(changes))):
        convert.engine_facts(hello(**changes))


def test_limits_are_those_of_the_registry() -> None:
    assert (bounds.MAX_TEXT_BYTES, bounds.MAX_ITEMS) == (rules._MAX_TEXT_BYTES, rules._MAX_ITEMS)
    assert (bounds.MAX_SET_ID_BYTES, bounds.MAX_RECORD_BYTES) == (rules._MAX_SET_ID_BYTES, rules.MAX_NODE_BYTES)


@pytest.mark.parametrize("engine_count", [0, 1, 9, 300])
@pytest.mark.parametrize("model_bytes", [1, 250, 1024])
def test_a_record_fits_whatever_it_would_have_to_say(engine_count: int, model_bytes: int) -> None:
    engine = replace(facts(), connector_version=LONG, vllm_version=LONG, weights_digest=LONG, problem=LONG)
    many = [replace(engine, engine_id=f"{rank:01024}", rank=rank) for rank in range(engine_count)]
    models = tuple(f"{number:03}".rjust(model_bytes, "m")[-model_bytes:] for number in range(300))
    node = node_of(*many, models=models, reason=LONG)
    check_node(node)
    assert len(node.models) >= min(256, 15_000 // model_bytes)
    assert len(node.engines) == min(engine_count, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"set_id": "é" * 128},
        {"token_count": 2**31 - 1, "spacing": 2**31 - 1, "anchors": b"a" * 32},
        {"stride": 2**31 - 1},
        {"deadline": 1e10},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_registry_takes_the_pointers_of_every_set_that_the_agent_takes(changes: dict[str, Any]) -> None:
    held = convert.block_set(msgspec.structs.replace(report(deadline=1.0), **changes))
    for pointer in convert.pointers(held, node_id="node-1", engine_id=LONG):
        rules.check_pointer(registry_convert.pointer_from_proto(pointer))


@pytest.mark.parametrize(("field", "value"), odd_fields(wire.Hello), ids=lambda part: str(part)[:20])
def test_no_hello_makes_a_record_that_the_registry_refuses(field: str, value: object) -> None:
    try:
        engine = convert.engine_facts(hello(**{field: value}))
    except bounds.OutOfBoundsError:
        return
    check_node(node_of(engine))


@pytest.mark.parametrize(("field", "value"), odd_fields(wire.BlockSetReport), ids=lambda part: str(part)[:20])
def test_no_report_makes_a_set_that_cannot_be_listed_or_published(field: str, value: object) -> None:
    sound = msgspec.structs.replace(report(deadline=1.0), **{field: value})
    try:
        held = convert.block_set(sound)
    except ValueError:
        return
    for pointer in convert.pointers(held, node_id="node-1", engine_id="engine-1"):
        rules.check_pointer(registry_convert.pointer_from_proto(pointer))
    table = standing()
    connection = table.connection["engine-1"]
    table.hear(ev.Reported(connection, "engine-1", held, sound.deadline))
    for one in table.owner.sets(table.now):
        assert convert.listed(one).set_id == sound.set_id
