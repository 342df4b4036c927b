"""Clocks of the model, and what one engine knows of another's."""

from collections.abc import Mapping
from dataclasses import dataclass

from backhaul_connector.clocks import Offset

_ROUND_TRIP_S = 0.004
_REMEASURE_S = 120.0


@dataclass(slots=True)
class Clock:
    """An engine's clock: an epoch of its own, and a rate of its own."""

    epoch: float
    rate: float

    def at(self, now: float) -> float:
        """Returns what it shows at `now` (true time)."""
        return self.epoch + now * self.rate


class RemoteClocks:
    """What a prefill engine knows of the clocks of decode engines: measured on first use, then every two minutes."""

    def __init__(self, own: Clock, engines: Mapping[str, Clock]) -> None:
        self._own = own
        self._engines = engines
        self._offsets: dict[str, Offset] = {}
        self._asked: set[str] = set()
        self._jumped: set[str] = set()
        self._now = 0.0

    def step(self, now: float) -> None:
        """Lets time pass; what was asked before is known now."""
        self._now = now
        for engine_id in self._asked:
            self.measure(engine_id)
        self._asked.clear()
        for engine_id, offset in list(self._offsets.items()):
            if self._own.at(now) - offset.at > _REMEASURE_S:
                self.measure(engine_id)

    def measure(self, engine_id: str) -> None:
        """Asks an engine for its clock."""
        clock = self._engines.get(engine_id)
        if clock is None:
            return
        own, remote = self._own.at(self._now), clock.at(self._now)
        measured = Offset(remote - own - _ROUND_TRIP_S, remote - own + _ROUND_TRIP_S, own)
        known = self._offsets.get(engine_id)
        if known is not None and known.excludes(measured):
            self._jumped.add(engine_id)
        self._offsets[engine_id] = measured

    def watch(self, engine_id: str, host: str, port: int) -> None:
        """Starts measuring an engine's clock."""
        if engine_id not in self._offsets:
            self._asked.add(engine_id)

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None:
        """Returns the seconds certainly left; None when the clock is not known."""
        offset = self._offsets.get(engine_id)
        if offset is None or engine_id in self._jumped:
            return None
        return deadline - (now + offset.widened(now).high)

    def measuring(self, engine_id: str) -> bool:
        """Tells whether a clock may soon be known."""
        return engine_id in self._asked

    def jumped(self, engine_id: str) -> bool:
        """Tells whether the engine's clock was seen to jump."""
        return engine_id in self._jumped
