"""The connector: vLLM's NixlConnector, which reports what it retains and proves what it reads.

It overrides public methods of ``KVConnectorBase_V1`` only (vLLM 0.32.0, ``kv_connector/v1/base.py``); the one private
thing it reads is the worker's lease map, and without that no renewal counts. The scheduler side runs in the engine's
loop: it never waits, and never fails a request that the stock connector would serve.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector as StockNixlConnector
from vllm.v1.request import RequestStatus

from backhaul_connector import decode, engine
from backhaul_connector.scheduler import SchedulerSide
from backhaul_connector.settings import Settings
from backhaul_connector.snapshot import LeaseSnapshot
from backhaul_connector.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.backhaul")


class NixlConnector(StockNixlConnector):
    """Drop-in replacement; the name is the one that vLLM compares with in several places."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        problem = engine.reuse_problem(vllm_config, settings.agent_socket)
        with engine.nixl_progress_thread(settings.nixl_progress_thread):
            super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._stops: list[Callable[[], None]] = []
        if role == KVConnectorRole.SCHEDULER:
            if problem:
                _log.warning("Backhaul: no reuse on this engine: %s", problem)
            scheduler = SchedulerSide(vllm_config, kv_cache_config, self.engine_id, settings, problem)
            scheduler.start()
            self._stops.append(scheduler.stop)
            # With a problem the agent is told, and the hooks below behave like the stock connector's.
            self._scheduler = None if problem else scheduler
        elif not problem:
            self._worker = WorkerSide()
            self._stops.append(self._worker.clocks.stop)

    # Scheduler side, in the order in which a request meets it.

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Takes the pool whose free blocks are reported."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        """Proves a handle, or opens a labelled turn, once per request."""
        super().on_new_request(request)
        if self._scheduler is None:
            return
        self._scheduler.arrived(request)
        if request.kv_transfer_params:
            self._scheduler.admit(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answers what can be read; None while it is not proved, for then vLLM asks again; nothing the second time.

        After a preemption vLLM asks again and would promise the same tokens, but starts a read only once
        (``_remote_blocks_processed``): the request would wait for ever.
        """
        if self._scheduler is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not self._scheduler.proved(request.request_id):
            return None, False
        params = request.kv_transfer_params or {}
        matched: tuple[int | None, bool] = 0, False
        if not (params.get("do_remote_decode") and params.get("_remote_blocks_processed")):
            self._scheduler.matched(request.request_id, num_computed_tokens)
            matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._scheduler.asked(request, num_computed_tokens, *matched)
        return matched

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Starts the read.

        A labelled turn that reads nothing gets ``do_remote_prefill`` for this one call: without it the worker does not
        track the request, and its blocks stay pinned for ever (``nixl/pull_scheduler.py``, ``nixl/pull_worker.py``).
        """
        if self._scheduler is not None:
            self._scheduler.allocated(request, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        """Notes how full the engine is: the step is planned, and who got no blocks in it waits for some."""
        if self._scheduler is not None:
            self._scheduler.stepped(scheduler_output.total_num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Reports what a labelled turn retains, in place of answering it to the client.

        On prefill, adds the verdict and until when the hand-off's blocks are certainly kept.
        """
        if self._scheduler is not None:
            self._scheduler.left(request)
        if self._scheduler is None or not request.kv_transfer_params:
            return super().request_finished_all_groups(request, block_ids)
        if request.kv_transfer_params.get("do_remote_decode"):
            # Before vLLM sets its own deadline, so that this one is the earlier.
            deadline = self._scheduler.hand_off_deadline(time.perf_counter())
            delay, params = super().request_finished_all_groups(request, block_ids)
            if delay and params:
                params = {**params, "remote_blocks_expiry_time": deadline}
            return delay, self._scheduler.with_verdict(request.request_id, params)
        if decode.label_of(request.kv_transfer_params) is None:
            return super().request_finished_all_groups(request, block_ids)
        turn = self._scheduler.closing(request)
        if turn is None:
            delay, _ = super().request_finished_all_groups(_Unretained(request), block_ids)
            return delay, None
        delay, params = super().request_finished_all_groups(request, block_ids)
        if delay and params:
            self._scheduler.retained(turn, request, params)
        return delay, None

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Reports freed sets and confirmed deadlines."""
        if self._scheduler is not None:
            self._scheduler.output(connector_output)
        super().update_connector_output(connector_output)

    # Worker side.

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Notes which reads with a deadline start, and the scheduler's clock."""
        if self._worker is not None:
            self._worker.step(self._connector_metadata)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Turns reads that complete after their deadline into failed ones."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.finished_recving, results.failed_recving = self._worker.fence.judge(
                results.finished_recving, results.failed_recving, time.perf_counter()
            )
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Names the blocks of late reads, so that they are not cached."""
        failed = super().get_block_ids_with_load_errors()
        return failed | self._worker.fence.take_late_blocks() if self._worker is not None else failed

    def build_connector_worker_meta(self) -> LeaseSnapshot | None:
        """Sends deadlines that heartbeats moved, and how many leases there are, to the scheduler side."""
        if self._worker is None:
            return None
        leases = getattr(self.connector_worker, "_reqs_to_send", None)
        moved = self._worker.leases.changed(leases, time.perf_counter())
        count, rank = self._worker.leases.recounted(), self.connector_worker.tp_rank
        if not moved and count is None:
            return None
        return LeaseSnapshot({rank: moved} if moved else {}, {} if count is None else {rank: count})

    def shutdown(self) -> None:
        """Ends the threads."""
        for stop in self._stops:
            stop()
        super().shutdown()


class _Unretained:
    """A request whose blocks vLLM shall free at once: it looks aborted, and of an aborted one vLLM keeps nothing."""

    status = RequestStatus.FINISHED_ABORTED

    def __init__(self, request: "Request") -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
