"""Lines on the socket between a connector and its agent, both ways."""

import itertools
from pathlib import Path
from typing import Any

import msgspec

from backhaul_connector import wire
from backhaul_node_agent import convert
from backhaul_node_agent.connector_server import ConnectorServer, ProtocolError, _Connection
from backhaul_node_agent.core import events as ev
from backhaul_registry import convert as registry_convert
from backhaul_registry.core import rules
from tests.fakes.block_sets import report
from tests.fakes.clock import FakeClock
from tests.fuzz.inputs import json_of, one_of
from tests.fuzz.target import Target

_HELLO = wire.Hello(
    protocol=wire.PROTOCOL_VERSION,
    engine_id="engine-d",
    rank=0,
    connector_version="0.1.0",
    vllm_version="0.32.0",
    weights_digest="w",
    block_size=16,
    block_count=100,
    tp_size=1,
    ttl_s=480.0,
    lease_s=30.0,
    recompute_threshold=64,
    side_channel_host="127.0.0.1",
    side_channel_port=5601,
    now=1.5,
)
_SAID = (
    _HELLO,
    wire.Identity(weights_digest="d"),
    wire.Retained(set=report()),
    wire.Retained(set=report("set-2"), replayed=True),
    wire.Replayed(set_count=0),
    wire.Freed(set_ids=["a", "b"]),
    wire.Deadlines(deadlines={"a": 1.25}),
    wire.Memory(free_count=7, waiting_count=3),
    wire.Pong(token=1.0, now=2.0, dropped_count=3),
)
_TOLD = (
    wire.Welcome(protocol=wire.PROTOCOL_VERSION, session="s"),
    wire.Ping(token=0.5),
    wire.Claimed(set_id="a"),
    wire.Returned(set_id="a"),
)


def _from_connector(line: bytes) -> bool:
    try:
        message = wire.decode_from_connector(line)
        facts = convert.engine_facts(message if isinstance(message, wire.Hello) else _HELLO)
        heard = _heard(message, facts)
    except (ValueError, ProtocolError):
        return False
    for event in heard:
        if isinstance(event, ev.Reported):
            _check_pointers(event)
    return True


def _heard(message: wire.FromConnector, facts: Any) -> list[ev.Event]:
    server = ConnectorServer(path=Path("unused"), session="s", clock=FakeClock())
    connection = _Connection(next(itertools.count(1)), facts, "", None)  # type: ignore[arg-type]  # nothing is written
    connection.pings[1.0] = None
    heard: list[ev.Event] = []
    if not isinstance(message, wire.Hello):
        server._handle(connection, message, heard.append)
    return heard


def _check_pointers(event: ev.Reported) -> None:
    """What an agent takes over the registry accepts: one pointer that it refuses would hold up all others."""
    for pointer in convert.pointers(event.block_set, node_id="d1", engine_id="engine-d"):
        rules.check_pointer(registry_convert.pointer_from_proto(pointer))


def _from_agent(line: bytes) -> bool:
    try:
        wire.decode_from_agent(line)
    except msgspec.DecodeError:
        return False
    return True


def _documents(*messages: Any) -> tuple[dict[str, Any], ...]:
    return tuple(msgspec.json.decode(wire.encode(message)) for message in messages)


TARGETS = (
    Target(
        "connector to agent",
        ("backhaul_connector.wire:_decode_from_connector", "backhaul_node_agent.convert:block_set"),
        one_of(json_of(*_documents(*_SAID)), json_of(*_documents(*_SAID[2:4]))),
        _from_connector,
    ),
    Target(
        "agent to connector",
        ("backhaul_connector.wire:_decode_from_agent",),
        json_of(*_documents(*_TOLD)),
        _from_agent,
    ),
)
