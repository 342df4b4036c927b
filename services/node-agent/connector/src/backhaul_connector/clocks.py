"""Clocks of other engines, as this engine sees them.

A deadline is a number in the decode engine's ``perf_counter``, whose epoch is its own. vLLM measures the offset once,
at the handshake (``nixl/base_worker.py``, ``_nixl_handshake``), and trusts it from then on. This module measures it
over the same side channel again and again, and says when a clock has jumped.
"""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

_log = logging.getLogger("vllm.backhaul.clocks")

REMEASURE_S = 120.0
DRIFT = 0.001
"""Largest relative rate difference between two clocks that is not a jump (quartz: under 0.0002)."""
_SLACK_S = 0.005
_TIMEOUT_MS = 2000
_MAX_CLOCKS = 1024
_MAX_REPLY_BYTES = 16 * 1024 * 1024
"""Longest part of a reply; an engine that sends more is cut off."""
_MAX_MISSES = 3
"""An engine that does not answer so many times in a row is forgotten: it has gone, and asking it costs seconds."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Bounds of (remote clock - own clock) in seconds, measured at ``at`` of the own clock."""

    low: float
    high: float
    at: float

    def widened(self, now: float) -> "Offset":
        """Returns the bounds that hold at ``now``, however the two clocks drifted within `DRIFT`."""
        slack = _SLACK_S + DRIFT * max(0.0, now - self.at)
        return Offset(self.low - slack, self.high + slack, now)

    def excludes(self, later: "Offset") -> bool:
        """Tells whether ``later`` cannot be the same clock without a jump."""
        widened = self.widened(later.at)
        return later.high < widened.low or later.low > widened.high


@dataclass(slots=True)
class _Clock:
    host: str
    port: int
    offset: Offset | None = None
    jumped: bool = False
    pending: bool = True
    misses: int = 0


Measure = Callable[[str, int, str], Offset | None]


class RemoteClocks:
    """Offsets of the engines that were named to `watch`; measured on a thread of its own.

    A clock that jumped stays jumped: the engine's deadlines mean nothing any more until it restarts under a new id.
    """

    def __init__(self, measure: Measure | None = None, remeasure_s: float = REMEASURE_S) -> None:
        self._measure = measure or measure_offset
        self._remeasure_s = remeasure_s
        self._clocks: dict[str, _Clock] = {}
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, engine_id: str, host: str, port: int) -> None:
        """Starts measuring an engine's clock, if that is not going on already. Never blocks."""
        known = self._clocks.get(engine_id)
        if known is not None:
            if known.offset is None and not known.pending:
                known.pending = True
                self._wanted.put(engine_id)
            return
        if len(self._clocks) >= _MAX_CLOCKS:
            self._clocks.pop(next(iter(self._clocks)), None)
        self._clocks[engine_id] = _Clock(host, port)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="backhaul-clocks", daemon=True)
            self._thread.start()
        self._wanted.put(engine_id)

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None:
        """Returns the seconds certainly left until ``deadline`` (remote clock) at ``now`` (own); None when unknown.

        Unknown: not measured yet, not reachable, or jumped.
        """
        clock = self._clocks.get(engine_id)
        if clock is None or clock.offset is None or clock.jumped:
            return None
        return deadline - (now + clock.offset.widened(now).high)

    def jumped(self, engine_id: str) -> bool:
        """Tells whether the engine's clock was seen to jump."""
        clock = self._clocks.get(engine_id)
        return clock is not None and clock.jumped

    def measuring(self, engine_id: str) -> bool:
        """Tells whether an engine's clock is not known yet and may soon be."""
        clock = self._clocks.get(engine_id)
        return clock is not None and clock.offset is None and clock.pending

    def stop(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join(timeout=_TIMEOUT_MS / 1000 + 1)

    def _run(self) -> None:
        due = time.monotonic() + self._remeasure_s
        stale: deque[str] = deque()
        while True:
            try:
                # An engine that a request waits for goes first: one that is gone costs seconds.
                engine_id = self._wanted.get(timeout=0.0 if stale else max(0.0, due - time.monotonic()))
            except queue.Empty:
                if not stale:
                    due = time.monotonic() + self._remeasure_s
                    stale.extend(list(self._clocks))
                    continue
                engine_id = stale.popleft()
            if engine_id is None:
                return
            self._update(engine_id)

    def _update(self, engine_id: str) -> None:
        clock = self._clocks.get(engine_id)
        if clock is None:
            return
        measured = self._measure(clock.host, clock.port, engine_id)
        if measured is None:
            self._missed(engine_id, clock)
            return
        clock.misses = 0
        if clock.offset is not None and clock.offset.excludes(measured):
            clock.jumped = True
            _log.error("Backhaul: the clock of engine %s jumped; its blocks are not read until it restarts", engine_id)
        clock.offset = measured
        clock.pending = False

    def _missed(self, engine_id: str, clock: _Clock) -> None:
        clock.pending = False
        clock.misses += 1
        if clock.misses >= _MAX_MISSES and not clock.jumped:
            self._clocks.pop(engine_id, None)


class _Payload(msgspec.Struct):
    """What is read of vLLM's ``NixlHandshakePayload`` (``nixl/metadata.py``)."""

    agent_metadata_bytes: bytes


class _Metadata(msgspec.Struct):
    """What is read of vLLM's ``NixlAgentMetadata``."""

    engine_id: str


def measure_offset(host: str, port: int, engine_id: str) -> Offset | None:
    """Asks an engine's side channel for its clock; None when it does not answer, or is another engine by now.

    The request and the two-part answer are vLLM's (``nixl/base_scheduler.py``, ``_nixl_handshake_listener``).
    """
    try:
        with zmq.Context() as context, context.socket(zmq.REQ) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
            sock.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
            sock.setsockopt(zmq.IPV6, 1)
            sock.setsockopt(zmq.MAXMSGSIZE, _MAX_REPLY_BYTES)
            sock.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            sent = time.perf_counter()
            sock.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            payload, clock = sock.recv_multipart()
            received = time.perf_counter()
        answered, remote = read_clock(payload, clock)
    except (zmq.ZMQError, ValueError) as error:
        _log.warning("Backhaul: no clock from %s:%s (%s)", host, port, error)
        return None
    if answered != engine_id:
        return None
    return Offset(remote - received, remote - sent, received)


def read_clock(payload: bytes, clock: bytes) -> tuple[str, float]:
    """Reads both parts of an answer: the engine's id and its clock. Raises ValueError for anything else."""
    try:
        remote = msgspec.msgpack.decode(clock, type=float)
        agent_metadata = msgspec.msgpack.decode(payload, type=_Payload).agent_metadata_bytes
        metadata = msgspec.msgpack.decode(agent_metadata, type=_Metadata)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not math.isfinite(remote):
        raise ValueError("a clock that shows no time")
    return metadata.engine_id, remote
