"""Messages survive the socket, and whatever is no message is an error of one kind."""

import msgspec
import pytest

from backhaul_connector import wire
from tests.fakes.block_sets import report

HELLO = wire.Hello(
    protocol=1,
    engine_id="engine-d",
    rank=0,
    connector_version="0.1.0",
    vllm_version="0.32.0",
    weights_digest="",
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


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        wire.Identity(weights_digest="d"),
        wire.Retained(set=report()),
        wire.Replayed(set_count=3),
        wire.Freed(set_ids=["a\n", "ü"]),
        wire.Deadlines(deadlines={"a": 1.25}),
        wire.Memory(free_count=7, waiting_count=3),
        wire.Pong(token=1.0, now=2.0, dropped_count=3),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_connector_says_arrives_as_one_line(message: wire.FromConnector) -> None:
    line = wire.encode(message)

    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.decode_from_connector(line) == message
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_agent(line)


@pytest.mark.parametrize(
    "message",
    [
        wire.Welcome(protocol=1, session="s"),
        wire.Ping(token=0.5),
        wire.Claimed(set_id="a"),
        wire.Returned(set_id="a"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_agent_says_arrives_as_one_line(message: wire.FromAgent) -> None:
    line = wire.encode(message)

    assert line.count(b"\n") == 1
    assert wire.decode_from_agent(line) == message
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_connector(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"[]",
        b"\xff",
        b"{",
        b'{"type":"claimed"}',
        b'{"type":"claimed","set_id":5}',
        b'{"type":"claimed","set_id":"\xed\xa0\x80"}',
        b'{"type":"ping","token":NaN}',
        b'{"type":"ping","token":1e999}',
        b'{"type":"ping","token":true}',
        b'{"type":"welcome","protocol":1.5,"session":"s"}',
        b'{"type":"other"}',
        b'{"set_id":"a"}',
        b"[" * 100_000,
        b'{"type":"ping","token":1,"x":' + b"[" * 100_000,
    ],
    ids=lambda line: line[:60],
)
def test_anything_else_is_an_error(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_agent(line)


def test_unknown_fields_of_a_newer_agent_are_passed_over() -> None:
    assert wire.decode_from_agent(b'{"type":"claimed","set_id":"a","new":1}') == wire.Claimed(set_id="a")
