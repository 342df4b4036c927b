"""A connector with a clock on its hooks, for engines: they load it with ``kv_connector_module_path``.

BACKHAUL_BENCH_CONNECTOR names the one that is timed, ``stock`` or ``backhaul``; the file BACKHAUL_BENCH_FIGURES gets a
line of JSON per request that ends.
"""

import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector as StockConnector

from backhaul_connector.connector import NixlConnector as BackhaulConnector
from backhaul_connector.engine import nixl_progress_thread
from benchmarks.connector.clocked import HookClock, HookTimes, figures

_Timed: Any = {"stock": StockConnector, "backhaul": BackhaulConnector}[os.environ["BACKHAUL_BENCH_CONNECTOR"]]


class NixlConnector(_Timed):  # type: ignore[misc]  # one of two, known when an engine starts
    """The connector that was chosen. NIXL's progress thread is off in either: it would take a core."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with nixl_progress_thread(False):
            super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            _Turn(self, Path(os.environ["BACKHAUL_BENCH_FIGURES"]))


class _Turn:
    """The turn that runs, for turns that run one by one."""

    def __init__(self, connector: Any, file: Path) -> None:
        self._file = file
        self._clock = HookClock(connector)
        self._plan, self._finish = connector.build_connector_meta, connector.request_finished_all_groups
        self._planned_at = 0.0
        self._planned = 0
        self._steps: list[tuple[float, HookTimes]] = []
        """Length of each step that computed one token, and its hooks' times."""
        self._all: list[HookTimes] = []
        connector.build_connector_meta = self._planning
        connector.request_finished_all_groups = self._finishing

    def _planning(self, scheduler_output: Any) -> Any:
        meta = self._plan(scheduler_output)
        now, hooks = time.perf_counter(), self._clock.take()
        # What a request took when it came is in the first step that computes something of it.
        if self._planned or scheduler_output.total_num_scheduled_tokens:
            self._all.append(hooks)
        if self._planned == 1:
            self._steps.append((now - self._planned_at, hooks))
        self._planned_at, self._planned = now, scheduler_output.total_num_scheduled_tokens
        return meta

    def _finishing(self, request: Any, block_ids: Any) -> Any:
        answer = self._finish(request, block_ids)
        self._all.append(self._clock.take())
        if self._steps:
            with self._file.open("a") as lines:
                lines.write(json.dumps(self._line(request.num_prompt_tokens)) + "\n")
        self._steps, self._all, self._planned = [], [], 0
        return answer

    def _line(self, tokens: int) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "steps": len(self._steps),
            "engine_step_us": 1e6 * median(length_s for length_s, _ in self._steps),
            **figures(self._all, [hooks for _, hooks in self._steps]),
        }
