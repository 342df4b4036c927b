"""Claims and grants of block sets."""

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
class Grant:
    """A claim that was granted: good for one prefill leg."""

    claim: Claim
    handle: str
    """kv_transfer_params for the prefill leg, a JSON object."""
