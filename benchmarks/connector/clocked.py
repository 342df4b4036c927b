"""How long a connector's hooks take in the scheduler's thread. Needs nothing but the standard library."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
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

    longest_s: float = 0.0
    """The longest call by the clock."""
    processor_s: float = 0.0
    longest: dict[str, float] = field(default_factory=dict)
    """Processor time of each hook's longest call."""

    def add(self, hook: str, seconds: float, processor_s: float) -> None:
        """Counts one call."""
        self.longest_s = max(self.longest_s, seconds)
        self.processor_s += processor_s
        self.longest[hook] = max(self.longest.get(hook, 0.0), processor_s)


def figures(times: Sequence[HookTimes], middle: Sequence[HookTimes], turn_count: int = 1) -> dict[str, Any]:
    """Returns what ``turn_count`` turns took, microseconds of processor time if nothing else is said.

    ``middle``: those of steps in which all that runs computes one token.
    """
    return {
        "step_us": 1e6 * fmean(one.processor_s for one in middle),
        "turn_us": 1e6 * sum(one.processor_s for one in times) / turn_count,
        "busiest_us": 1e6 * max(one.processor_s for one in times),
        "hooks_us": {hook: 1e6 * max(one.longest.get(hook, 0.0) for one in times) for hook in HOOKS},
        "waited_us": 1e6 * max(one.longest_s for one in times),
    }


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
