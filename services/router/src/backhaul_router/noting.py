"""Has a turn noted for people who look on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry.trace import Span, format_trace_id

from backhaul_router.core.console.journal import Entry, Journal
from backhaul_router.core.errors import bounded
from backhaul_router.running_turn import Turn

_LONGEST_NAME = 200


_NOT_NOTED = nullcontext()


def noted(journal: Journal, turn: Turn) -> AbstractContextManager[None]:
    """Notes a turn while it runs, and what has become of it then."""
    return _noted(journal, turn) if journal.keeps else _NOT_NOTED


@contextmanager
def _noted(journal: Journal, turn: Turn) -> Iterator[None]:
    with journal.turn(turn.path, bounded(turn.body.model, _LONGEST_NAME), turn.tenant, turn.outcome) as entry:
        entry.keyed(turn.scope, turn.keys)
        entry.trace_id = _trace_id(turn.trace.span)
        try:
            yield
        finally:
            _end(entry, turn)


def _end(entry: Entry, turn: Turn) -> None:
    entry.own = turn.own_keys
    entry.tried = tuple(sorted(turn.tried))
    if turn.plan is not None:
        entry.prefill = turn.plan.prefill.node.node_id if turn.plan.prefill else ""
        entry.decode = turn.plan.decode.node.node_id
    if turn.warm is not None:
        entry.holder = turn.warm.holder.node.node_id


def _trace_id(span: Span) -> str:
    """Returns hex; empty when nothing is traced."""
    context = span.get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""
