"""The span, metrics and the log line of each turn. No prompts, completions, keys or client ids in any of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from backhaul_common.attributes import (
    GEN_AI_MODEL,
    GEN_AI_OPERATION,
    GEN_AI_PROVIDER,
    GEN_AI_STREAM,
    NODE_ID,
    SOURCE_NODE_ID,
)
from backhaul_common.clock import Clock
from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.errors import ApiError, bounded
from backhaul_router.core.health.breakers import Breakers, BreakerState
from backhaul_router.core.nodes import Node
from backhaul_router.core.turn import Outcome
from backhaul_router.turn_spans import TurnTrace, describe, ended

_log = structlog.get_logger(__name__)

_ERROR_BOUNDS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

_LONGEST_NAME = 200
"""Characters of a model's name that a span has. While no node is known nothing else limits it."""

_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
}


class TurnObserver:
    """Opens a trace for each turn, and counts and logs what became of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tracer = trace.get_tracer("backhaul_router")
        meter = metrics.get_meter("backhaul_router")
        self._turns = meter.create_counter("backhaul.router.turns", description="Turns by route and result")
        self._misses = meter.create_counter("backhaul.router.misses", description="Cold turns by reason")
        self._tokens = meter.create_counter("backhaul.router.prompt_tokens", description="Prompt tokens by source")
        self._fallbacks = meter.create_counter("backhaul.router.fallbacks", description="Prompts computed by decode")
        self._bare = meter.create_counter("backhaul.router.missing_handoffs", description="Two legs, no hand-off")
        self._apart = meter.create_counter("backhaul.router.pairs_apart", description="Pairs that could not exchange")
        self._hand_offs = meter.create_histogram(
            "backhaul.router.handoff", unit="s", description="Prefill's answer to decode's request"
        )
        self._errors = meter.create_histogram(
            "backhaul.router.estimate_error",
            unit="1",
            description="Time to first byte of streams over what was estimated when the route was chosen",
            explicit_bucket_boundaries_advisory=_ERROR_BOUNDS,
        )
        self._broken = meter.create_counter(
            "backhaul.router.broken_off", description="Answers behind a gateway that engines broke off"
        )
        self._ttft = meter.create_histogram(
            "backhaul.router.ttft", unit="s", description="Time to first byte of streams by route"
        )

    @contextmanager
    def turn(self, body: TurnBody, outcome: Outcome, parent: Context | None) -> Iterator[TurnTrace]:
        """Observes one turn."""
        operation = _OPERATIONS[body.endpoint]
        model = bounded(body.model, _LONGEST_NAME)
        attributes = {GEN_AI_OPERATION: operation, GEN_AI_PROVIDER: "vllm", GEN_AI_MODEL: model}
        span = self._tracer.start_span("turn", parent or Context(), SpanKind.SERVER, attributes)
        if body.stream:
            span.set_attribute(GEN_AI_STREAM, True)
        turn = TurnTrace(self._tracer, span, self._clock)
        result = "cancelled"
        try:
            with ended(span):
                try:
                    yield turn
                    result = outcome.result
                except Exception as error:
                    result = _result_of(error)
                    raise
                finally:
                    describe(span, outcome, result)
        finally:
            self._count(outcome, result)
            with turn.current():
                _log_turn(operation, outcome, result)

    @contextmanager
    def question(self, parent: Context | None) -> Iterator[TurnTrace]:
        """Spans what is asked about a turn that is not run."""
        span = self._tracer.start_span("explain", parent or Context(), SpanKind.SERVER)
        with ended(span):
            yield TurnTrace(self._tracer, span, self._clock)

    def handed_off(self, seconds: float) -> None:
        """A hand-off reached its decode engine this long after the prefill engine had answered.

        Prefill keeps the blocks for a limited time, which is the longer the sooner decode knows of them.
        """
        self._hand_offs.record(seconds)

    def missing_hand_off(self) -> None:
        """A prefill engine answered without anything for the decode engine."""
        self._bare.add(1)

    def set_apart(self, turn: TurnTrace, reader: Node, source: Node, seconds: float) -> None:
        """A node could not read another's blocks, though the request was fine: the two are set apart for a while."""
        names = {NODE_ID: reader.node_id, SOURCE_NODE_ID: source.node_id}
        turn.span.add_event("pair set apart", names)
        self._apart.add(1)
        _log.warning("pair set apart", reader=reader.node_id, source=source.node_id, seconds=seconds)

    def began(self, route: str, ttft_s: float, estimate_s: float | None) -> None:
        """The first byte of a stream is there; both times count from the client's request."""
        self._ttft.record(ttft_s, {"route": route})
        if estimate_s:
            self._errors.record(ttft_s / estimate_s, {"route": route})

    def broken_off(self, node_id: str) -> None:
        """An engine broke off an answer of which no router saw the end."""
        self._broken.add(1)
        _log.warning("an engine broke off an answer", node_id=node_id)

    def _count(self, outcome: Outcome, result: str) -> None:
        route = outcome.route.value
        self._turns.add(1, {"route": route, "result": result})
        if outcome.miss:
            self._misses.add(1, {"reason": outcome.miss})
        if outcome.fallback:
            self._fallbacks.add(1)
        if outcome.ttft_s is not None:
            self.began(route, outcome.ttft_s, None if outcome.repeated else outcome.estimate_s)
        for source, count in _sources(outcome).items():
            self._tokens.add(count, {"source": source})


def observe_nodes(breakers: Breakers) -> None:
    """Has the nodes counted by how they are used, whenever metrics are read."""

    def observations(_: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        counts = breakers.states()
        return (metrics.Observation(counts[state], {"state": state.value}) for state in BreakerState)

    metrics.get_meter("backhaul_router").create_observable_gauge(
        "backhaul.router.nodes", [observations], description="Nodes by how they are used"
    )


def _result_of(error: Exception) -> str:
    if isinstance(error, ApiError):
        return f"error_{error.status}"
    return "client_gone" if isinstance(error, ConnectionError) else "failed"


def _sources(outcome: Outcome) -> dict[str, int]:
    computed = outcome.prompt_token_count - outcome.local_token_count - outcome.read_token_count
    return {"local": outcome.local_token_count, "read": outcome.read_token_count, "computed": max(0, computed)}


def _log_turn(operation: str, outcome: Outcome, result: str) -> None:
    _log.info(
        "turn",
        operation=operation,
        result=result,
        route=outcome.route.value,
        source=outcome.source or None,
        miss=outcome.miss or None,
        fallback=outcome.fallback,
        prompt_tokens=outcome.prompt_token_count,
        local_tokens=outcome.local_token_count,
        read_tokens=outcome.read_token_count,
        ttft_ms=_ms(outcome.ttft_s),
        answer_ms=_ms(outcome.answer_s),
        estimate_ms=_ms(outcome.estimate_s),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
