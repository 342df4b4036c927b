"""Why a turn is cold: a fixed list, used in headers, metrics and logs."""

import re

FIRST_TURN = "first_turn"
"""Nothing before this turn that could have left a block set."""
NO_KEYS = "no_keys"
"""No session id and no message list: nothing to look up by."""
NOT_FOUND = "not_found"
REUSE_OFF = "reuse_off"
LOOKUP_TIMEOUT = "lookup_timeout"
"""Registry or owner did not answer within the budget."""
REGISTRY_UNAVAILABLE = "registry_unavailable"
OWNER_UNAVAILABLE = "owner_unavailable"
"""The owner did not answer, or its node is not there or not ready."""
AMBIGUOUS = "ambiguous"
"""Several block sets, and the prompt's tokens could not be had to choose among them."""
NO_MATCH = "no_match"
"""Several block sets, none of which is a prefix of the prompt."""
INCOMPATIBLE = "incompatible"
"""No prefill node can exchange blocks with the holder."""
NO_CONNECTOR = "no_connector"
"""No prefill engine that fits would verify the blocks: it has no connector, another version of it, or cannot reuse."""
PAIR_APART = "pair_apart"
"""Every prefill node that could read failed to read from this holder a moment ago."""
UNSUPPORTED_REQUEST = "unsupported_request"
"""A request kind that needs one engine alone."""
NOT_NEEDED = "not_needed"
"""The prefill engine had nearly all of it in its own cache: too little was left to be worth a read."""
NOT_WORTH = "not_worth"
"""What was found would have been slower to reuse than to compute anew, as far as that can be estimated."""
ROUTE_OFF = "route_off"
"""The router is told not to take that route."""
UNPROVED = "unproved"
"""Only a session id led to what is held: the messages before may be others."""
TOO_LONG = "too_long"
"""More is new than decode engines should compute."""
HOLDER_AVOIDED = "holder_avoided"
"""The holder has failed of late, and others are well."""
NO_DECODE = "no_decode"
PREFILL_FAILED = "prefill_failed"
"""The warm prefill leg failed and was repeated cold."""
DECODE_FAILED = "decode_failed"
"""The decode engine failed before it said anything; the turn was repeated cold."""
NO_PREFILL = "no_prefill"
"""No prefill node is ready; the decode engine computes the prompt."""

WITHOUT_REUSE = frozenset({NO_KEYS, REUSE_OFF, UNSUPPORTED_REQUEST})
"""Nothing was looked up, and nothing is kept for a next turn."""

HARVEST_TIMEOUT = "harvest_timeout"
"""Nothing to claim, and no fresh handle for what is still cached within the budget for that."""
NO_TOKENS = "no_tokens"
"""Nothing to claim, and the prompt's tokens, which a fresh handle needs, could not be had."""

SECOND_CHANCE = frozenset(
    {
        FIRST_TURN,
        NOT_FOUND,
        OWNER_UNAVAILABLE,
        AMBIGUOUS,
        NO_MATCH,
        INCOMPATIBLE,
        NO_CONNECTOR,
        PAIR_APART,
        "claim:set_unknown",
        "claim:set_expiring",
        "claim:set_claimed",
        "claim:set_fenced",
        "claim:draining",
    }
)
"""There is nothing to claim, at least not for this turn: what is merely cached may do."""

CLAIM, HARVEST = "claim:", "harvest:"
"""What an owner's refusals begin with."""

_UNSAFE = re.compile(r"[^a-z0-9_]+")
_LONGEST = 40


def claim_refused(reason: str) -> str:
    """Returns the miss reason for an owner's refusal, such as ``claim:set_claimed``."""
    return CLAIM + _slug(reason)


def harvest_refused(reason: str) -> str:
    """Returns the miss reason for an owner that made no fresh handle, such as ``harvest:not_cached``."""
    return HARVEST + _slug(reason)


def handle_refused(verdict: str) -> str:
    """Returns the miss reason for a handle that the prefill engine's connector did not use."""
    return f"refused:{_slug(verdict)}"


def _slug(text: str) -> str:
    # Reasons come from peers and end up as metric labels.
    return _UNSAFE.sub("_", text.lower())[:_LONGEST] or "unknown"
