"""Spans, metrics and the log line of each turn. No prompts, completions, keys or client ids in any of them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backhaul_common.attributes import (
    FALLBACK,
    LOCAL_TOKENS,
    MISS_REASON,
    NODE_ID,
    PROMPT_TOKENS,
    READ_TOKENS,
    ROUTE,
    SOURCE_NODE_ID,
)
from backhaul_common.clock import Clock
from backhaul_router.core.body import Endpoint
from backhaul_router.core.errors import ApiError
from backhaul_router.core.health.breakers import Breakers, BreakerState
from backhaul_router.core.nodes import Node
from backhaul_router.core.turn import Outcome

_log = structlog.get_logger(__name__)
_propagator = TraceContextTextMapPropagator()

_ERROR_BOUNDS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
}


def context_from(carrier: dict[str, str]) -> Context:
    """Returns the caller's trace context from lower-case headers; a fresh one when it is missing or malformed."""
    return _propagator.extract(carrier, context=Context())


class TurnTrace:
    """The spans of one turn. They are started and ended by hand: a context must not stay attached across yields."""

    def __init__(self, tracer: trace.Tracer, span: Span, clock: Clock) -> None:
        self._tracer = tracer
        self._context = trace.set_span_in_context(span, Context())
        self._clock = clock
        self._began = clock.monotonic()
        self.span = span

    @property
    def elapsed_s(self) -> float:
        """Seconds since the turn began."""
        return self._clock.monotonic() - self._began

    @contextmanager
    def leg(self, name: str, node: Node, outcome: Outcome) -> Iterator[dict[str, str]]:
        """Spans one leg; yields the trace headers for its engine."""
        attributes = {NODE_ID: node.node_id, ROUTE: outcome.route.value}
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)
        headers: dict[str, str] = {}
        _propagator.inject(headers, context=trace.set_span_in_context(span, Context()))
        with _ended(span):
            yield headers

    @contextmanager
    def step(self, name: str) -> Iterator[Span]:
        """Spans a step whose gRPC calls become its children; no yields of generators inside."""
        span = self._tracer.start_span(name, self._context)
        with (
            _ended(span),
            trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False),
        ):
            yield span


@contextmanager
def _ended(span: Span) -> Iterator[None]:
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        span.set_status(Status(StatusCode.ERROR, "cancelled"))
        raise
    except Exception as error:
        if not isinstance(error, ApiError) or error.status >= 500:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()


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
    def turn(self, endpoint: Endpoint, model: str, outcome: Outcome, parent: Context | None) -> Iterator[TurnTrace]:
        """Observes one turn."""
        operation = _OPERATIONS[endpoint]
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm", "gen_ai.request.model": model}
        span = self._tracer.start_span("turn", parent or Context(), SpanKind.SERVER, attributes)
        turn = TurnTrace(self._tracer, span, self._clock)
        result = "cancelled"
        try:
            with _ended_late(span, outcome):
                yield turn
            result = outcome.result
        except ApiError as error:
            result = f"error_{error.status}"
            raise
        except ConnectionError:
            result = "client_gone"
            raise
        except Exception:
            result = "failed"
            raise
        finally:
            self._count(outcome, result)
            with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                _log_turn(operation, outcome, result)

    @contextmanager
    def question(self, parent: Context | None) -> Iterator[TurnTrace]:
        """Spans what is asked about a turn that is not run."""
        span = self._tracer.start_span("explain", parent or Context(), SpanKind.SERVER)
        with _ended(span):
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


@contextmanager
def _ended_late(span: Span, outcome: Outcome) -> Iterator[None]:
    """Puts the outcome on the span before it ends."""
    with _ended(span):
        try:
            yield
        finally:
            span.set_attributes(
                {
                    ROUTE: outcome.route.value,
                    PROMPT_TOKENS: outcome.prompt_token_count,
                    "gen_ai.usage.input_tokens": outcome.prompt_token_count,
                    LOCAL_TOKENS: outcome.local_token_count,
                    READ_TOKENS: outcome.read_token_count,
                }
            )
            if outcome.miss:
                span.set_attribute(MISS_REASON, outcome.miss)
            if outcome.fallback:
                span.set_attribute(FALLBACK, True)
            if outcome.result == "broken":
                span.set_status(Status(StatusCode.ERROR, "engine stopped in the middle"))


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
