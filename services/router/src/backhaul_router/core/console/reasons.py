"""Why turns are cold, for people: what each reason means, and what to do about it."""

from dataclasses import dataclass

from backhaul_router.core import misses

FINE = ""
"""There is nothing to do about it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for a miss."""

    meaning: str
    remedy: str = FINE


_LOOK_AT_RECORD = "Look at the node's engines under Nodes: their records say what is missing, and how to set it."

REASONS: dict[str, Reason] = {
    misses.FIRST_TURN: Reason("The conversation begins: no turn before this one could have left anything."),
    misses.NO_KEYS: Reason(
        "There was nothing to look up by.",
        "/v1/completions has no message list: send X-Session-ID, or conversation_id in the body.",
    ),
    misses.NOT_FOUND: Reason(
        "The history shows an earlier turn, and nothing is retained under it.",
        "Often the same turn was sent again: a block set is used once. Else the client or its template rewrote the "
        "history, the earlier turn ended on a stop string or was aborted, its time was over, or memory was short: see "
        "what its node retains, and against which limit.",
    ),
    misses.REUSE_OFF: Reason("The client switched reuse off for this request."),
    misses.LOOKUP_TIMEOUT: Reason(
        "Registry or owner did not answer within the lookup budget.",
        "See whether etcd and the network are slow; raise the router's --lookup-budget-s where they cannot be faster.",
    ),
    misses.REGISTRY_UNAVAILABLE: Reason(
        "No registry answered, or etcd did not.",
        "See that the registries of --registry run, and that etcd has a leader and room.",
    ),
    misses.OWNER_UNAVAILABLE: Reason(
        "The node that holds the conversation is not there, not ready, or its agent did not answer.",
        "See the node under Nodes, and whether this router reaches its agent's address.",
    ),
    misses.AMBIGUOUS: Reason(
        "Several block sets might fit, and the prompt's tokens could not be had to tell which one does.",
        "See that /tokenize of the prefill engines answers within the lookup budget.",
    ),
    misses.NO_MATCH: Reason(
        "None of the block sets that were found is a beginning of this prompt.",
        "The history was edited, or the chat template leaves part of it out, such as earlier reasoning.",
    ),
    misses.INCOMPATIBLE: Reason(
        "No prefill node can exchange blocks with the one that holds the conversation.",
        "Run the same vLLM, connector, weights, block size and dtypes on both sides. " + _LOOK_AT_RECORD,
    ),
    misses.NO_CONNECTOR: Reason(
        "No prefill engine that fits would verify the blocks: it runs without Backhaul's connector or with another "
        "version of it than the holder, or it has it and cannot reuse.",
        _LOOK_AT_RECORD,
    ),
    misses.PAIR_APART: Reason(
        "Every prefill node that could read failed to read from this holder a moment ago.",
        "Look at NIXL between the two: network, ports, UCX's transports.",
    ),
    misses.UNSUPPORTED_REQUEST: Reason("This kind of request is served by one engine alone."),
    misses.NOT_NEEDED: Reason("The prefill engine had nearly all of the prompt in its own cache: nothing was lost."),
    misses.NOT_WORTH: Reason(
        "Computing anew promised to be faster, as it is for short conversations.",
        "If it was not: see the estimates with --explain, and docs/routing.md.",
    ),
    misses.ROUTE_OFF: Reason(
        "The router may not take a route that reuses anything here.", "See its --routes and --prefer."
    ),
    misses.UNPROVED: Reason(
        "Only a session id led to what is held: the messages before may be others, so the holder may not go on alone.",
        "Allow the warm route, by which the prompt is compared.",
    ),
    misses.TOO_LONG: Reason(
        "More is new than a decode engine should compute.", "See the limits in the routing file, or allow warm."
    ),
    misses.HOLDER_AVOIDED: Reason(
        "The node that holds the conversation failed of late, and others are well.",
        "See why its engine fails: its breaker is shown under Nodes.",
    ),
    misses.NO_DECODE: Reason("No decode node could take the turn.", "See which decode nodes are ready."),
    misses.PREFILL_FAILED: Reason(
        "The prefill leg that read blocks failed, and was repeated cold.",
        "See the engines' logs: NIXL between the two, or an engine that fails.",
    ),
    misses.DECODE_FAILED: Reason(
        "The decode engine failed before it said anything, and the turn was repeated cold.", "See that engine's log."
    ),
    misses.NO_PREFILL: Reason(
        "No prefill node was ready: the decode engine computed the prompt.", "See why no prefill node is ready."
    ),
    misses.HARVEST_TIMEOUT: Reason(
        "Nothing was retained, and no second chance came within its budget.",
        "Raise --harvest-budget-s, or --retained-share of the agents so that more is retained.",
    ),
    misses.NO_TOKENS: Reason(
        "Nothing was retained, and the prompt's tokens, which a second chance needs, could not be had.",
        "See that /tokenize of the engines answers within --harvest-budget-s.",
    ),
    "claim:set_claimed": Reason(
        "Another request was first: the same turn was sent twice, or two branches go on from it."
    ),
    "claim:set_unknown": Reason(
        "The pointer outlived its block set: it was read, released or had expired.",
        "If it is frequent: see whether memory is short, and whether agents publish without delay.",
    ),
    "claim:set_fenced": Reason("The agent restarted a moment ago and does not grant yet what it found."),
    "claim:set_expiring": Reason(
        "Too little of its time was left.",
        "Raise decoder_kv_blocks_ttl and kv_lease_duration, and --max-retention-s of the agents.",
    ),
    "claim:connector_away": Reason(
        "The holder's engine has lost its agent.", "See the socket between the two (BACKHAUL_AGENT_SOCKET)."
    ),
    "claim:lease_invalid": Reason(
        "The holder's agent has lost its place in the directory.", "See whether registry and etcd answer it."
    ),
    "claim:draining": Reason("The node that holds the conversation is being drained."),
    "claim:weights_mismatch": Reason("The two engines have different weights.", _LOOK_AT_RECORD),
    "harvest:not_cached": Reason(
        "Nothing was retained, and the engine has evicted most of it.",
        "Memory is short for these conversations: raise --retained-share, or add decode engines.",
    ),
    "harvest:backed_off": Reason("Nothing was retained, and the engine cached less than it had said a moment ago."),
    "harvest:no_events": Reason(
        "Nothing was retained, and its agent does not follow what the engine caches.",
        "Second chances need --kv-events at the agent.",
    ),
}

_KINDS = {
    "claim:": Reason("The owner refused the claim.", "The name after the colon says why; see docs/engines.md."),
    "harvest:": Reason(
        "Nothing was retained, and the owner gave no second chance.",
        "The name after the colon says why; see docs/engines.md.",
    ),
    "refused:": Reason(
        "The prefill engine's connector did not use the blocks: too few tokens were proved equal, or time had run out.",
        "The history was edited, or the chat template leaves part of it out. The name after the colon says what "
        "the connector found.",
    ),
}


def reason_for(miss: str) -> Reason:
    """Returns what a miss means; for one that nobody knows only its name can be told."""
    kinds = (reason for prefix, reason in _KINDS.items() if miss.startswith(prefix))
    return REASONS.get(miss) or next(kinds, Reason("See docs/engines.md for this reason."))
