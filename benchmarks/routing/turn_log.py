"""What a router says of its turns in its log: how long the first token was estimated to take, and how long it took."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Estimated:
    """One turn, as its router saw it; seconds."""

    estimate_s: float
    ttft_s: float


class TurnLog:
    """The log of one router, from the making of this on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size

    def turns(self) -> list[Estimated]:
        """Returns the turns that have ended since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [*_turns(whole)]


def _turns(text: bytes) -> Iterator[Estimated]:
    for line in text.splitlines():
        event = _object(line)
        estimate_ms, ttft_ms = event.get("estimate_ms"), event.get("ttft_ms")
        if event.get("event") == "turn" and estimate_ms is not None and ttft_ms is not None:
            yield Estimated(estimate_ms / 1000, ttft_ms / 1000)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
