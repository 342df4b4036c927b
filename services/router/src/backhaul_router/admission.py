"""How much the router takes on at once. Whatever is beyond that is refused at once, with a reason."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import metrics

from backhaul_common.clock import Clock
from backhaul_router.core.errors import ApiError

_log = structlog.get_logger(__name__)

MAX_LISTS = 32
"""Model lists at once; each asks every engine."""

MAX_ENDINGS = 256
"""Conversations that are being ended at once; each asks the registry several times."""

_LOG_EVERY_S = 10.0


class Admission:
    """Counts what runs and the bytes of the bodies it holds, over HTTP and gRPC together."""

    def __init__(self, *, max_turns: int, max_held_bytes: int, clock: Clock) -> None:
        self._max_turns = max_turns
        self._max_held_bytes = max_held_bytes
        self._clock = clock
        self._turn_count = 0
        self._list_count = 0
        self._ending_count = 0
        self._held_bytes = 0
        self._logged_s = -math.inf
        meter = metrics.get_meter("backhaul_router")
        self._running = meter.create_up_down_counter("backhaul.router.running_turns", description="Turns that run")
        self._held = meter.create_up_down_counter(
            "backhaul.router.held_bodies", unit="By", description="Request bodies held by turns"
        )
        self._refusals = meter.create_counter("backhaul.router.refusals", description="Requests refused by limit")

    @property
    def turn_count(self) -> int:
        """Turns that run."""
        return self._turn_count

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies that turns hold."""
        return self._held_bytes

    @contextmanager
    def turn(self) -> Iterator["Held"]:
        """Counts one turn in, and out again on leaving, with all that it held. Raises ApiError (429)."""
        if self._turn_count >= self._max_turns:
            raise self._refusal("too_many_turns", f"{self._max_turns} turns run on this router", self._max_turns)
        self._turn_count += 1
        self._running.add(1)
        held = Held(self)
        try:
            yield held
        finally:
            self._turn_count -= 1
            self._running.add(-1)
            self._let_go(held.byte_count)

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Counts one model list. Raises ApiError (429)."""
        if self._list_count >= MAX_LISTS:
            raise self._refusal("too_many_lists", f"{MAX_LISTS} model lists run on this router", MAX_LISTS)
        self._list_count += 1
        try:
            yield
        finally:
            self._list_count -= 1

    @contextmanager
    def ending(self, byte_count: int = 0) -> Iterator[None]:
        """Counts one conversation that is being ended, and the bytes of its body. Raises ApiError (429)."""
        if self._ending_count >= MAX_ENDINGS:
            what = f"{MAX_ENDINGS} conversations are being ended by this router"
            raise self._refusal("too_many_endings", what, MAX_ENDINGS)
        self.hold(byte_count)
        self._ending_count += 1
        try:
            yield
        finally:
            self._ending_count -= 1
            self._let_go(byte_count)

    def hold(self, byte_count: int) -> None:
        """Counts bytes in. Raises ApiError (429), and counts nothing, when that is too much."""
        limit = self._max_held_bytes
        if self._held_bytes + byte_count > limit:
            raise self._refusal("too_many_bytes", f"request bodies of {limit} bytes are held by this router", limit)
        self._held_bytes += byte_count
        self._held.add(byte_count)

    def _let_go(self, byte_count: int) -> None:
        self._held_bytes -= byte_count
        self._held.add(-byte_count)

    def _refusal(self, code: str, what: str, limit: int) -> ApiError:
        self._refusals.add(1, {"reason": code})
        now = self._clock.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            # Refusals come in thousands, and say all the same.
            self._logged_s = now
            _log.warning("refusing requests", reason=code, limit=limit)
        return ApiError(
            429, f"{what}, which is its limit; try again in a moment", code=code, headers={"retry-after": "1"}
        )


class Held:
    """What one turn holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.byte_count = 0

    def grow(self, byte_count: int) -> None:
        """Holds more bytes. Raises ApiError (429)."""
        self._admission.hold(byte_count)
        self.byte_count += byte_count
