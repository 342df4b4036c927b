"""The router's metrics. No label is a node's, a tenant's, a session's or a request's."""

from backhaul_common.metering import LONG_S, SHORT_S, Kind, Label, Metric, one_of
from backhaul_router.core import misses
from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import Failure
from backhaul_router.core.health.breakers import BreakerState
from backhaul_router.core.passing import PASSED
from backhaul_router.core.queueing import Refusal
from backhaul_router.core.turn import Route

_P = "backhaul.router."

GRANTED = "granted"

_CLAIM = (
    "set_unknown",
    "set_claimed",
    "set_fenced",
    "set_expiring",
    "draining",
    "lease_invalid",
    "weights_mismatch",
    "connector_away",
    "claim_returned",
    "request_id_reused",
    "bad_handle",
)
"""Why an owner grants nothing (`ClaimBlockSet` in agent.proto)."""
_HARVEST = (
    "not_cached",
    "no_events",
    "engine_unknown",
    "engine_failed",
    "draining",
    "lease_invalid",
    "weights_mismatch",
    "unsupported_model",
    "clock_unknown",
    "backed_off",
    "bad_handle",
    "too_many_calls",
    "unavailable",
    "owner_gone",
)
"""Why an owner makes no fresh handle (`HarvestBlockSet` in agent.proto)."""
_REFUSED = (
    "used",
    "clock_jumped",
    "expired",
    "too_short",
    "layout",
    "unproved",
    "no_deadline",
    "malformed",
    "unhashed_prompt",
    "weights_unknown",
    "identity",
)
"""Why a prefill engine's connector does not use a handle (`refused` of wire.Verdict)."""

_PLAIN = {text for name, text in vars(misses).items() if name.isupper() and isinstance(text, str)} - {
    misses.CLAIM,
    misses.HARVEST,
}
MISS_REASONS = frozenset(
    _PLAIN
    | {misses.claim_refused(reason) for reason in _CLAIM}
    | {misses.harvest_refused(reason) for reason in _HARVEST}
    | {misses.handle_refused(reason) for reason in _REFUSED}
)

_STATUSES = (400, 401, 403, 404, 405, 408, 409, 412, 413, 415, 422, 424, 429, 431, 500, 501, 502, 503, 504)
"""With which a turn is refused, by the router or by an engine."""

RESULTS = frozenset(
    {"ok", "refused", "failed", "broken", "cancelled", "given_up", "client_gone"}
    | {f"error_{status}" for status in _STATUSES}
)

_ROUTE = one_of("route", (route.value for route in Route))

TURNS = Metric(
    name=_P + "turns",
    kind=Kind.COUNTER,
    unit="{turn}",
    description="Turns that have ended, by route and by what became of them",
    labels=(_ROUTE, one_of("result", RESULTS), Label("model", frozenset(), "models that nodes serve")),
)
TURN_DURATION = Metric(
    name=_P + "turn.duration",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Turns from their request to the end of their answer",
    labels=(_ROUTE,),
    bounds=LONG_S,
)
TTFT = Metric(
    name=_P + "ttft",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Time from the request to the first byte of answers that are streamed",
    labels=(_ROUTE,),
    bounds=LONG_S,
)
ESTIMATE_ERROR = Metric(
    name=_P + "estimate_error",
    kind=Kind.HISTOGRAM,
    unit="1",
    description="Time to first byte of streams over what was estimated when the route was chosen",
    labels=(_ROUTE,),
    bounds=(0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
MISSES = Metric(
    name=_P + "misses",
    kind=Kind.COUNTER,
    unit="{turn}",
    description="Cold turns by reason",
    labels=(one_of("reason", MISS_REASONS),),
)
PROMPT_TOKENS = Metric(
    name=_P + "prompt_tokens",
    kind=Kind.COUNTER,
    unit="{token}",
    description="Prompt tokens: computed anew, reused from prefill's own cache (local), or read from decode's blocks",
    labels=(one_of("source", ("local", "read", "computed")),),
)
FALLBACKS = Metric(
    name=_P + "fallbacks",
    kind=Kind.COUNTER,
    unit="{turn}",
    description="Prompts that decode computed, as no prefill engine could",
)
MISSING_HAND_OFFS = Metric(
    name=_P + "missing_handoffs",
    kind=Kind.COUNTER,
    unit="{turn}",
    description="Answers of prefill engines without anything for the decode engine",
)
HAND_OFF = Metric(
    name=_P + "handoff",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Time from prefill's answer to decode's request",
    bounds=SHORT_S,
)
PAIRS_APART = Metric(
    name=_P + "pairs_apart",
    kind=Kind.COUNTER,
    unit="{pair}",
    description="Pairs of nodes set apart, as one could not read the other's blocks",
)
BROKEN_OFF = Metric(
    name=_P + "broken_off",
    kind=Kind.COUNTER,
    unit="{answer}",
    description="Answers behind a gateway that engines broke off",
)

LOOKUP_DURATION = Metric(
    name=_P + "lookup.duration",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Lookups of turns at a registry, waits for the turn before included",
    bounds=SHORT_S,
)
CLAIMS = Metric(
    name=_P + "claims",
    kind=Kind.COUNTER,
    unit="{claim}",
    description="Claims at owners: granted (a hit), or why not",
    labels=(one_of("result", (GRANTED, misses.LOOKUP_TIMEOUT, misses.OWNER_UNAVAILABLE, *_CLAIM)),),
)
CLAIM_DURATION = Metric(
    name=_P + "claim.duration",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Claims at owners, granted or not",
    bounds=SHORT_S,
)
SECOND_CHANCES = Metric(
    name=_P + "second_chances",
    kind=Kind.COUNTER,
    unit="{harvest}",
    description="Fresh handles that owners were asked for: granted, or why not",
    labels=(one_of("result", (GRANTED, misses.HARVEST_TIMEOUT, misses.NO_TOKENS, *_HARVEST)),),
)

RUNNING_TURNS = Metric(name=_P + "running_turns", kind=Kind.LEVEL, unit="{turn}", description="Turns that run")
QUEUED_TURNS = Metric(name=_P + "queued_turns", kind=Kind.LEVEL, unit="{turn}", description="Turns that wait")
QUEUE_WAIT = Metric(
    name=_P + "queue_wait",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Time that turns waited, by what came of it",
    labels=(one_of("result", ("running", "refused", "late", "left")),),
    bounds=LONG_S,
)
HELD_BODIES = Metric(
    name=_P + "held_bodies", kind=Kind.LEVEL, unit="By", description="Request bodies that running turns hold"
)
REFUSALS = Metric(
    name=_P + "refusals",
    kind=Kind.COUNTER,
    unit="{request}",
    description="Requests refused by a limit",
    labels=(
        one_of(
            "reason",
            (*(refusal.value for refusal in Refusal), "too_many_bytes", "too_many_lists", "too_many_endings"),
        ),
    ),
)
DROPPED_CONNECTIONS = Metric(
    name=_P + "dropped_connections",
    kind=Kind.COUNTER,
    unit="{connection}",
    description="HTTP connections ended by a limit",
    labels=(one_of("reason", ("too_many", "idle", "slow_request", "slow_reader")),),
)
DROPPED_CALLS = Metric(
    name=_P + "dropped_calls",
    kind=Kind.COUNTER,
    unit="{call}",
    description="Calls over gRPC ended because their client did not read",
)
PASSED_ON = Metric(
    name=_P + "passed",
    kind=Kind.COUNTER,
    unit="{request}",
    description="Requests that are no turns, passed on to an engine",
    labels=(one_of("path", (*PASSED, Endpoint.RESPONSES.value + "/{id}")),),
)

NODES = Metric(
    name=_P + "nodes",
    kind=Kind.LEVEL,
    unit="{node}",
    description="Nodes by their breaker: closed is well, open is ejected",
    labels=(one_of("state", (state.value for state in BreakerState)),),
)
EJECTIONS = Metric(
    name=_P + "ejections",
    kind=Kind.COUNTER,
    unit="{ejection}",
    description="Nodes that were ejected, by their latest failure; the log says which",
    labels=(one_of("failure", (failure.value for failure in Failure)),),
)
ORPHANS = Metric(
    name=_P + "orphans",
    kind=Kind.LEVEL,
    unit="{node}",
    description="Nodes whose agent is gone and whose engine goes on",
)
REGISTRY_WATCH = Metric(
    name=_P + "registry_watch",
    kind=Kind.LEVEL,
    unit="1",
    description="Whether the nodes are followed at a registry (1), or are as they were last (0)",
)
REGISTRY_BREAKS = Metric(
    name=_P + "registry_watch.breaks",
    kind=Kind.COUNTER,
    unit="{break}",
    description="Attempts to follow the nodes that ended, at whichever registry",
)
TENANT_READS = Metric(
    name=_P + "tenants.reads",
    kind=Kind.COUNTER,
    unit="{read}",
    description="Readings of a tenants file that had changed: taken, or refused as it cannot be used",
    labels=(one_of("result", ("taken", "refused")),),
)
