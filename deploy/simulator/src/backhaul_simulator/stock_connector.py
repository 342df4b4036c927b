"""vLLM's own NixlConnector (``nixl/connector.py``): the class that Backhaul's connector is a subclass of."""

from typing import Any

from backhaul_simulator.connector_base import (
    Connector,
    EngineMemory,
    KVCacheBlocks,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    NixlConnectorMetadata,
)
from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.pull_scheduler import PullConnectorScheduler
from backhaul_simulator.pull_worker import PullConnectorWorker
from backhaul_simulator.side_channel import NixlHandshakePayload
from backhaul_simulator.vllm_config import KVCacheConfig, VllmConfig


class NixlConnector(Connector):
    """One object per role; with vLLM's ``uni`` executor both live in one process."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        from vllm import envs

        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self._connector_metadata: NixlConnectorMetadata | None = None
        self._payload: NixlHandshakePayload | None = None
        self.connector_scheduler: PullConnectorScheduler | None = None
        self.connector_worker: PullConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = PullConnectorScheduler(
                vllm_config,
                self.engine_id,
                host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
                port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index,
            )
        else:
            self.connector_worker = PullConnectorWorker(vllm_config, self.engine_id)

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Does nothing: vLLM's own connector does not look at the pool."""

    def on_new_request(self, request: EngineRequest) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int, bool]:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.request_finished(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.update_connector_output(connector_output)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], NixlHandshakePayload]) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.listen(metadata[0, 0])

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, EngineMemory]) -> None:
        assert self.connector_worker is not None
        self._payload = self.connector_worker.register_kv_caches(kv_caches["all"])

    def get_handshake_metadata(self) -> NixlHandshakePayload | None:
        return self._payload

    def bind_connector_metadata(self, connector_metadata: NixlConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.connector_worker is not None
        assert self._connector_metadata is not None
        self.connector_worker.start_load_kv(self._connector_metadata)

    def wait_for_save(self) -> None:
        """Does nothing: without host buffers there is nothing to save."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.connector_worker is not None
        return self.connector_worker.get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.connector_worker is not None
        return self.connector_worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None

    def shutdown(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()
