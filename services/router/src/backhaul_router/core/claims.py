"""Claims and grants of block sets, and the names of hand-offs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to make."""

    address: str
    """Agent of the node that holds the block set."""
    request_id: str
    set_id: str
    engine_id: str
    scope: str
    weights_digest: str
    """Of the prefill engine that will read."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """What a prefill engine keeps for a decode engine."""

    address: str
    """Agent of the prefill node."""
    engine_id: str
    hand_off_id: str


@dataclass(frozen=True, slots=True)
class Released:
    """What became of block sets that nobody needs any more."""

    released: int = 0
    """Told to the engine."""
    deferred: int = 0
    """Being read, or may be: released once that is over."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim that was granted: good for one prefill leg."""

    claim: Claim
    handle: str
    """kv_transfer_params for the prefill leg, a JSON object."""
