"""Whether engines that have requests get on with them, as their own figures show.

A server may answer its health check while an engine behind it is stuck. Its figures then stand still: any change of one
of them, but for requests that arrive, is progress. An engine without requests may stand still for as long as it likes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from backhaul_node_agent.core.bounds import MAX_COUNT

# vLLM, v1/metrics/loggers.py: each has the labels model_name and engine, the data-parallel rank. Labels are short, of
# one line: the time that reading takes must grow with the length alone, whatever a server shows.
_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|prompt_tokens_total"
    r'|generation_tokens_total)\{[^}\n]{0,1024}?engine="(\d{1,5})"[^}\n]{0,1024}\} '
    r"(\d{1,32}(?:\.\d{1,32})?(?:e[+-]?\d{1,4})?)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one engine shows."""

    waiting: float = 0.0
    running: float = 0.0
    used: float = 0.0
    """Part of the KV cache in use: moves while a long prompt is computed and no token comes out yet."""
    token_count: float = 0.0
    """Tokens computed and generated since its start."""

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return self.waiting + self.running > 0


def read_figures(exposition: str) -> dict[int, Figures]:
    """Returns the figures of each rank from what a server's /metrics says; what it lacks counts as 0.

    Whatever a server shows, requests fit into what the protos count in, and a part is no more than all.
    """
    found: dict[int, dict[str, float]] = {}
    for name, rank, value in _SAMPLE.findall(exposition):
        figures = found.setdefault(int(rank), {})
        figures[name] = figures.get(name, 0.0) + float(value)
    return {rank: _figures(values) for rank, values in found.items()}


def request_count(figures: Mapping[int, Figures]) -> int | None:
    """Returns how many requests run or wait on all engines together; None when no figures are shown."""
    if not figures:
        return None
    return min(MAX_COUNT, round(sum(shown.running + shown.waiting for shown in figures.values())))


def _figures(values: Mapping[str, float]) -> Figures:
    return Figures(
        waiting=min(MAX_COUNT, values.get("num_requests_waiting", 0.0)),
        running=min(MAX_COUNT, values.get("num_requests_running", 0.0)),
        used=min(1.0, values.get("kv_cache_usage_perc", 0.0)),
        token_count=values.get("prompt_tokens_total", 0.0) + values.get("generation_tokens_total", 0.0),
    )


class Progress:
    """Since when each rank has stood still."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen: dict[int, tuple[Figures, float]] = {}

    def problem(self, figures: Mapping[int, Figures], now: float) -> str:
        """Takes the figures as they are now and says which engine is stuck; empty when none is."""
        self._seen = {rank: self._since(rank, shown, now) for rank, shown in figures.items()}
        stuck = [rank for rank, (_, since) in self._seen.items() if now - since >= self._stall_s]
        if not stuck:
            return ""
        return f"the engine of rank {min(stuck)} has requests and made no progress for {self._stall_s:g} s"

    def _since(self, rank: int, shown: Figures, now: float) -> tuple[Figures, float]:
        before, since = self._seen.get(rank, (shown, now))
        arrived = shown.waiting > before.waiting
        still = (shown.running, shown.used, shown.token_count) == (before.running, before.used, before.token_count)
        moved = not still or (shown.waiting != before.waiting and not arrived)
        return shown, now if moved or not (shown.busy and before.busy) else since
