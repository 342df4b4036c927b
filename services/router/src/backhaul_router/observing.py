"""The span, metrics and the log line of each turn. No prompts, completions, keys or client ids in any of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import trace
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
from backhaul_common.metering import OTHER, Counter, Histogram, Values, observe
from backhaul_router import instruments
from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import ApiError, bounded
from backhaul_router.core.health.breakers import Breakers, BreakerState
from backhaul_router.core.nodes import Node, NodeTable
from backhaul_router.core.turn import Outcome
from backhaul_router.turn_spans import Ended, TurnTrace, describe

_log = structlog.get_logger(__name__)

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

    def __init__(self, clock: Clock, *, serves: Callable[[str], bool]) -> None:
        """``serves`` tells whether a node serves a model: no other is named in metrics."""
        self._clock = clock
        self._serves = serves
        self._tracer = trace.get_tracer("backhaul_router")
        self._turns = Counter(instruments.TURNS)
        self._durations = Histogram(instruments.TURN_DURATION)
        self._misses = Counter(instruments.MISSES)
        self._tokens = Counter(instruments.PROMPT_TOKENS)
        self._fallbacks = Counter(instruments.FALLBACKS)
        self._bare = Counter(instruments.MISSING_HAND_OFFS)
        self._apart = Counter(instruments.PAIRS_APART)
        self._hand_offs = Histogram(instruments.HAND_OFF)
        self._errors = Histogram(instruments.ESTIMATE_ERROR)
        self._broken = Counter(instruments.BROKEN_OFF)
        self._ttft = Histogram(instruments.TTFT)
        self._ejections = Counter(instruments.EJECTIONS)

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
            with Ended(span):
                try:
                    yield turn
                    result = outcome.result
                except Exception as error:
                    result = _result_of(error)
                    raise
                finally:
                    describe(span, outcome, result)
        finally:
            self._count(outcome, result, model, turn.elapsed_s)
            with turn.current():
                _log_turn(operation, outcome, result)

    @contextmanager
    def question(self, parent: Context | None) -> Iterator[TurnTrace]:
        """Spans what is asked about a turn that is not run."""
        span = self._tracer.start_span("explain", parent or Context(), SpanKind.SERVER)
        with Ended(span):
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
        with turn.current():
            _log.warning("pair set apart", reader=reader.node_id, source=source.node_id, seconds=seconds)

    def ejected(self, node: Node, failure: Failure) -> None:
        """A node is used only when there is no other, after this failure."""
        self._ejections.add(1, failure.value)
        _log.warning("node ejected", node_id=node.node_id, failure=failure.value)

    def began(self, route: str, ttft_s: float, estimate_s: float | None) -> None:
        """The first byte of a stream is there; both times count from the client's request."""
        self._ttft.record(ttft_s, route)
        if estimate_s:
            self._errors.record(ttft_s / estimate_s, route)

    def broken_off(self, node_id: str) -> None:
        """An engine broke off an answer of which no router saw the end."""
        self._broken.add(1)
        _log.warning("an engine broke off an answer", node_id=node_id)

    def _count(self, outcome: Outcome, result: str, model: str, elapsed_s: float) -> None:
        route = outcome.route.value
        self._turns.add(1, route, result, model if self._serves(model) else OTHER)
        self._durations.record(elapsed_s, route)
        if outcome.miss:
            self._misses.add(1, outcome.miss)
        if outcome.fallback:
            self._fallbacks.add(1)
        if outcome.ttft_s is not None:
            self.began(route, outcome.ttft_s, None if outcome.repeated else outcome.estimate_s)
        for source, count in _sources(outcome).items():
            self._tokens.add(count, source)


def observe_nodes(breakers: Breakers, table: NodeTable, follows: Callable[[], bool]) -> None:
    """Has the nodes counted by how they are used, whenever metrics are read.

    ``follows`` tells whether they are as a registry has them now.
    """

    def states() -> Values:
        counts = breakers.states()
        return {(state.value,): counts[state] for state in BreakerState}

    observe(instruments.NODES, states)
    observe(instruments.ORPHANS, lambda: {(): len(table.orphans)})
    observe(instruments.REGISTRY_WATCH, lambda: {(): follows()})


def _result_of(error: Exception) -> str:
    if isinstance(error, ApiError):
        return f"error_{error.status}"
    if isinstance(error, EngineError):
        # Before anything of the answer was there it would be the client's error.
        return "broken"
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
