"""How long a connector's hooks take in the scheduler's thread. Needs nothing but the standard library."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "update_connector_output",
)
"""Hooks of ``KVConnectorBase_V1`` that vLLM calls in the scheduler's thread, step after step."""


@dataclass(slots=True)
class HookTimes:
    """Times of hooks, seconds, since they were last taken.

    By the clock, and by the processor time of their thread: that one has no part in what else the machine does, but
    does not show either how long a hook waited.
    """

    spent_s: float = 0.0
    longest_s: float = 0.0
    processor_s: float = 0.0
    longest_processor_s: float = 0.0
    longest: str = ""
    """The hook that took most processor time in one call."""

    def add(self, hook: str, seconds: float, processor_s: float) -> None:
        """Counts one call."""
        self.spent_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.processor_s += processor_s
        if processor_s > self.longest_processor_s:
            self.longest_processor_s, self.longest = processor_s, hook


class HookClock:
    """Times every call of a connector's hooks from now on."""

    def __init__(self, connector: Any) -> None:
        self._times = HookTimes()
        for hook in HOOKS:
            setattr(connector, hook, self._clocked(hook, getattr(connector, hook)))

    def take(self) -> HookTimes:
        """Returns the times since the last call."""
        times, self._times = self._times, HookTimes()
        return times

    def _clocked(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            began, began_processor = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                processor_s = time.thread_time() - began_processor
                self._times.add(hook, time.perf_counter() - began, processor_s)

        return clocked
