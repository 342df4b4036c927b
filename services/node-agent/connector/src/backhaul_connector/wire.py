"""Messages between the connector inside an engine and the node agent beside it, and what rides in kv_transfer_params.

The socket is a Unix stream socket on which the agent listens; each message is one line of JSON (msgspec, bytes as
base64). The connector connects, says `Hello`, gets `Welcome`, replays every retained set as `Retained` with
``replayed`` set, ends the replay with `Replayed`, and then reports what happens. A connection is a session: what the
agent does not get on one connection it learns from the replay of the next. Nothing on either side waits for the other.

All times are the engine's ``time.perf_counter()`` in seconds. Its epoch is the engine's own; the agent estimates the
offset with `Ping` and `Pong`.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

PROTOCOL_VERSION = 2
"""Both sides must speak the same version; the agent refuses another one with a clear log line. It changes with whatever
one side needs of the other: an agent that does not know how full its engine is would retain too much, or too little."""

PARAMS_KEY = "backhaul"
"""Key in kv_transfer_params under which everything of ours rides."""

MAX_LINE_BYTES = 8 * 1024 * 1024
"""Longest line either side accepts; a longer one ends the connection."""


class BlockSetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A block set that the engine retains, as the connector knows it."""

    set_id: str
    """vLLM's request id on the decode engine (`remote_request_id`)."""
    scope: str
    keys: list[str]
    params: dict[str, Any]
    """vLLM's kv_transfer_params as the engine made them; `remote_block_ids` has one list per cache group."""
    token_count: int
    block_count: int
    identity: bytes
    stride: int
    spacing: int
    anchors: bytes
    deadline: float
    """Deadline that the engine last confirmed."""
    ended_at: float
    """When the turn ended."""
    turn_s: float
    """How long it took, from its arrival at this engine to its end."""
    continues: list[str] = []
    """Keys by which the turn before it was looked up; empty when none was."""
    traceparent: str = ""
    """Names the turn's span, as its label does."""
    claimed: bool = False
    """Whether an agent said that it granted the set and did not take that back."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of the connector."""

    protocol: int
    engine_id: str
    rank: int
    """Data-parallel index."""
    connector_version: str
    vllm_version: str
    problem: str = ""
    """Why this engine cannot reuse blocks, for people; empty when it can."""
    weights_digest: str
    """Empty while it is being computed or when it cannot be: see `Identity`."""
    block_size: int
    block_count: int
    tp_size: int
    kv_head_count: int = 0
    """KV heads that tensor-parallel ranks divide among them; 0 when unknown, or when they do not."""
    ttl_s: float
    """How long the engine keeps a finished turn's blocks (`decoder_kv_blocks_ttl`)."""
    lease_s: float
    """`kv_lease_duration`; a heartbeat moves a deadline to now + 2/3 of it."""
    recompute_threshold: int
    """`kv_recompute_threshold`, tokens."""
    side_channel_host: str
    side_channel_port: int
    now: float
    last_session: str = ""
    """Session of the agent that this engine was last connected to; empty for none."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, tag="identity"):
    """The weights digest, once it is known; or why it is not."""

    weights_digest: str
    problem: str = ""


class Retained(msgspec.Struct, frozen=True, kw_only=True, tag="retained"):
    """The engine retains a block set (or, in a replay, still does)."""

    set: BlockSetReport
    replayed: bool = False


class Replayed(msgspec.Struct, frozen=True, kw_only=True, tag="replayed"):
    """End of the replay: sets of this engine that were not in it are gone."""

    set_count: int


class Freed(msgspec.Struct, frozen=True, kw_only=True, tag="freed"):
    """The engine has freed these block sets: read, released or expired alike."""

    set_ids: list[str]


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, tag="deadlines"):
    """Deadlines as the engine's workers have them now; only those that changed."""

    deadlines: dict[str, float]


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """How full the engine is, seen after everything that was said before. Only the latest is sent."""

    free_count: int
    """Blocks that a request can have at once."""
    waiting_count: int
    """Blocks that requests asked for in the last step and did not get, those of the requests behind them included."""


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping`, with what the connector counts."""

    token: float
    now: float
    dropped_count: int
    """Messages dropped since the engine started because the queue was full or the agent away."""
    foreign_count: int = 0
    """Leases that are no reported set's, as of the engine's last step."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """First message of the agent."""

    protocol: int
    session: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Asks for the engine's clock. Sent about every second; a connector that hears none for 10 s reconnects."""

    token: float


class Claimed(msgspec.Struct, frozen=True, kw_only=True, tag="claimed"):
    """The agent grants a set. Written before the grant is answered, so that a successor learns of it by the replay."""

    set_id: str


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag="returned"):
    """The grant of a set was taken back unused."""

    set_id: str


FromConnector = Hello | Identity | Retained | Replayed | Freed | Deadlines | Memory | Pong
FromAgent = Welcome | Ping | Claimed | Returned


NAME = r"[A-Za-z0-9._:-]{1,128}"
"""Scopes and keys that the registry takes: blocks under a name that it refuses would be retained and never found."""

MAX_CONTINUES = 4
"""Keys of the turn before that a label names."""

_Name = Annotated[str, msgspec.Meta(pattern=rf"\A{NAME}\Z")]


class TurnLabel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`backhaul` in the params of a decode leg: how the next turn will find this one.

    What a newer router says besides is left aside: no blocks are lost by it.
    """

    scope: _Name
    keys: Annotated[list[_Name], msgspec.Meta(max_length=32)]
    """Lookup keys; empty: nothing will come back for the blocks, free them at once."""
    continues: Annotated[list[_Name], msgspec.Meta(max_length=MAX_CONTINUES)] = []
    """Keys by which the turn before this one was looked up, best first."""
    traceparent: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Names the turn's span (W3C trace context); empty unless its trace is recorded."""


class HandleProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`backhaul` in the params of a warm prefill leg: what the handle claims to cover."""

    scope: str
    identity: str
    """Hex."""
    stride: int
    spacing: int
    token_count: int
    anchors: str
    """Hex."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`backhaul` in the params that a prefill engine answers: what became of the prompt."""

    prompt: int
    """Tokens of the prompt."""
    local: int
    """Tokens that the engine had in its own cache."""
    read: int
    """Tokens read from the decode engine."""
    verified: int = 0
    """Tokens of the handle proved equal to the prompt."""
    spent: bool = False
    """Whether the decode engine was read or notified, so that the block set is gone."""
    refused: str = ""
    """Why the handle was not used; empty when it was, or when there was none."""


_Message = TypeVar("_Message")

_decode_from_connector: Callable[[bytes], FromConnector] = msgspec.json.Decoder(FromConnector).decode
_decode_from_agent: Callable[[bytes], FromAgent] = msgspec.json.Decoder(FromAgent).decode
_encode = msgspec.json.Encoder().encode


def encode(message: FromConnector | FromAgent) -> bytes:
    """Returns the message as one line, newline included."""
    return _encode(message) + b"\n"


def decode_from_connector(line: bytes) -> FromConnector:
    """Parses one line. Raises msgspec.DecodeError (or its subclass ValidationError) for anything else."""
    return _decode(_decode_from_connector, line)


def decode_from_agent(line: bytes) -> FromAgent:
    """Parses one line. Raises msgspec.DecodeError (or its subclass ValidationError) for anything else."""
    return _decode(_decode_from_agent, line)


def _decode(decode: Callable[[bytes], _Message], line: bytes) -> _Message:
    try:
        return decode(line)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
