"""Ends legs that wait at nodes that have gone: nobody will answer them."""

import asyncio
from types import TracebackType

import structlog

from backhaul_common.clock import Clock
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.nodes import Node, NodeState, NodeTable

_log = structlog.get_logger(__name__)

_Place = tuple[str, str]
"""Node id and URL of its engine: a node is hashed with all that it says."""

INTERVAL_S = 0.25
"""Between two looks at the nodes that legs wait for, seconds."""


class Departures:
    """Knows which legs wait at which nodes.

    A node has gone when it is not in the table any more (not even orphaned), answers at another address, or has not
    been ready for ``patience_s`` seconds.
    """

    def __init__(self, table: NodeTable, clock: Clock, *, patience_s: float) -> None:
        self._table = table
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: dict[_Place, set[asyncio.Timeout]] = {}
        self._unready: dict[str, float] = {}
        """Since when nodes that legs wait at are not ready."""

    def waiting_at(self, node: Node, failure: Failure = Failure.GONE) -> "Waiting":
        """Returns what to be in while nothing of an answer is there; EngineError comes out of it when the node goes."""
        return Waiting(self._waiting, (node.node_id, node.engine_url), failure)

    async def watch(self) -> None:
        """Looks again and again, until cancelled."""
        while True:
            self.look()
            await self._clock.sleep(INTERVAL_S)

    def look(self) -> None:
        """Ends the legs that wait at nodes that have gone."""
        now = self._clock.monotonic()
        ids = {node_id for node_id, _ in self._waiting if not self._ready(node_id)}
        self._unready = {node_id: self._unready.get(node_id, now) for node_id in ids}
        for place in [place for place in self._waiting if self._gone(place, now)]:
            scopes = self._waiting.pop(place)
            _log.warning("node has gone, legs without an answer end", node_id=place[0], leg_count=len(scopes))
            for scope in scopes:
                scope.reschedule(0)

    def _gone(self, place: _Place, now: float) -> bool:
        node_id, engine_url = place
        known = self._table.known(node_id)
        if known is None or known.engine_url != engine_url:
            return True
        return now - self._unready.get(node_id, now) >= self._patience_s

    def _ready(self, node_id: str) -> bool:
        known = self._table.known(node_id)
        return known is not None and known.state is not NodeState.NOT_READY


class Waiting:
    """One leg that waits at one node."""

    __slots__ = ("_failure", "_place", "_scope", "_waiting")

    def __init__(self, waiting: dict[_Place, set[asyncio.Timeout]], place: _Place, failure: Failure) -> None:
        self._waiting = waiting
        self._place = place
        self._failure = failure
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._waiting.setdefault(self._place, set()).add(self._scope)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scopes = self._waiting.get(self._place)
        if scopes is not None:
            scopes.discard(self._scope)
            if not scopes:
                del self._waiting[self._place]
        try:
            await self._scope.__aexit__(exc_type, exc, traceback)
        except TimeoutError:
            raise EngineError(self._failure) from None
