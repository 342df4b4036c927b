"""The socket between a decode engine's connector and the agents: one session at a time, which breaks when it likes."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from backhaul_connector import wire
from backhaul_node_agent import convert
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import EngineFacts
from tests.model.engine import BLOCK_COUNT, BLOCK_SIZE, WEIGHTS, DecodeEngine

if TYPE_CHECKING:
    from tests.model.agent import AgentProcess

_ROUND_TRIP_S = 0.02


class Link:
    """The sessions of one incarnation."""

    def __init__(self, engine: DecodeEngine, numbers: Iterator[int]) -> None:
        self.agent: AgentProcess | None = None
        """To whom the connector is connected."""
        self.stalled_until = 0.0
        """The connector is too slow to send anything before."""
        self._engine = engine
        self._numbers = numbers
        self._number = 0
        self._last_session = ""
        self._replay: deque[wire.FromConnector] = deque()
        self._replayed = 0
        self._pings = 0

    def connect(self, agent: "AgentProcess", now: float) -> None:
        """Begins a session, which begins with a replay."""
        self.agent, self._number = agent, next(self._numbers)
        self.stalled_until = 0.0
        agent.hear(ev.EngineConnected(self._number, self.facts(now), self._last_session), now)
        self._last_session = agent.session
        self._replay, self._replayed = deque(self._engine.ledger.connect()), 0
        self.ping(now)

    def facts(self, now: float) -> EngineFacts:
        """Returns what an agent is told of the engine."""
        return convert.engine_facts(self._hello(now))

    def cut(self, now: float, *, noticed: bool = True) -> None:
        """Ends the session. An agent that has not `noticed` yet still has to take in what was sent before."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        events: list[ev.Event] = []
        if not noticed:
            with contextlib.suppress(BufferError):
                while (message := self._next()) is not None:
                    events.append(self._event(message))
        self._engine.ledger.disconnect()
        self._replay.clear()
        agent.lost([*events, ev.ConnectorLost(self._number, self._engine.engine_id)], now, noticed=noticed)

    def tell(self, message: wire.Claimed | wire.Returned) -> None:
        """Brings the connector what its agent wrote."""
        self._engine.ledger.mark(message.set_id, claimed=isinstance(message, wire.Claimed))

    def ping(self, now: float) -> None:
        """Lets the agent look at the engine's clock; the way there takes all of the round trip, or the way back."""
        if self.agent is None or now < self.stalled_until:
            return
        self._pings += 1
        shown = self._engine.clock.at(now - _ROUND_TRIP_S * (self._pings % 2))
        self.agent.hear(
            ev.ClockObserved(self._number, self._engine.engine_id, now - _ROUND_TRIP_S, shown, now),
            now,
        )

    def pump(self, now: float, limit: int = 10_000) -> None:
        """Brings the agent at most `limit` messages. A queue that overflowed ends the session."""
        for _ in range(limit):
            if self.agent is None or now < self.stalled_until or self.agent.frozen:
                return
            try:
                message = self._next()
            except BufferError:
                self.cut(now)
                return
            if message is None:
                return
            self.agent.hear(self._event(message), now)

    def _next(self) -> wire.FromConnector | None:
        return self._replay.popleft() if self._replay else self._engine.ledger.take()

    def _event(self, message: wire.FromConnector) -> ev.Event:
        number, engine_id = self._number, self._engine.engine_id
        match message:
            case wire.Retained(set=report, replayed=replayed):
                self._replayed += replayed
                block_set = convert.block_set(report)
                return ev.Reported(
                    number, engine_id, block_set, report.deadline, granted=report.claimed, replayed=replayed
                )
            case wire.Replayed(set_count=count):
                assert count == self._replayed
                return ev.ReplayFinished(number, engine_id)
            case wire.Freed(set_ids=set_ids):
                return ev.SetsFreed(number, engine_id, set_ids)
            case wire.Memory(free_count=free, waiting_count=waiting):
                return ev.MemorySeen(number, engine_id, free, waiting)
            case wire.Deadlines(deadlines=deadlines):
                return ev.DeadlinesConfirmed(number, engine_id, deadlines)
            case _:
                raise AssertionError(message)

    def _hello(self, now: float) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            engine_id=self._engine.engine_id,
            rank=0,
            connector_version="0.1.0",
            vllm_version="0.32.0",
            weights_digest=WEIGHTS,
            block_size=BLOCK_SIZE,
            block_count=BLOCK_COUNT,
            tp_size=1,
            ttl_s=300.0,
            lease_s=180.0,
            recompute_threshold=64,
            side_channel_host="127.0.0.1",
            side_channel_port=5601,
            now=self._engine.clock.at(now),
            last_session=self._last_session,
        )
