"""What vLLM gives to connectors and takes from them (``kv_connector/v1/base.py``, ``nixl/metadata.py``)."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.transfer import Kind


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - as in vLLM
    """What the scheduler side sends to the worker side with a step."""


class KVConnectorWorkerMetadata(ABC):
    """What the worker side sends back with a step's output."""

    @abstractmethod
    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata": ...


@dataclass
class KVConnectorTransferResults:
    """Transfers that ended since the last step; failed ones are among the finished ones too."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class KVConnectorOutput:
    """The connector's part of a step's output (``v1/outputs.py``)."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None


@dataclass(frozen=True)
class KVCacheBlocks:
    """The blocks of a request, as connectors see them (``v1/core/kv_cache_manager.py``)."""

    pool: BlockPool
    block_ids: Sequence[int]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Returns the blocks that the prefix cache does not know: those that a read has to fill."""
        return [[block_id for block_id in self.block_ids if self.pool.hashes[block_id] is None]]


@dataclass
class HeartbeatInfo:
    req_ids: set[str]
    host: str
    port: int
    tp_size: int


@dataclass
class RemoteMeta:
    block_ids: list[list[int]]
    host: str
    port: int
    engine_id: str
    request_id: str
    blocks_expiry_time: float | None = None
    num_tokens: int | None = None


@dataclass
class ReqMeta:
    local_block_ids: Sequence[Sequence[int]]
    tp_size: int
    remote: RemoteMeta
    awaiting_kvs: bool


class NixlConnectorMetadata(KVConnectorMetadata):
    """One step's news from the scheduler side."""

    def __init__(self) -> None:
        self.reqs_to_recv: dict[str, ReqMeta] = {}
        self.reqs_to_send: dict[str, float] = {}
        self.scheduler_clock = 0.0
        self.reqs_in_batch: set[str] = set()
        self.reqs_not_processed: set[str] = set()
        self.heartbeat_by_engine: dict[str, HeartbeatInfo] = {}

    def add_new_req_to_recv(
        self, request_id: str, local_block_ids: Sequence[Sequence[int]], params: dict[str, Any], awaiting_kvs: bool
    ) -> None:
        """Adds a read, or a notification that nothing needs to be read."""
        remote = RemoteMeta(
            block_ids=params["remote_block_ids"],
            engine_id=params["remote_engine_id"],
            request_id=params["remote_request_id"],
            host=params["remote_host"],
            port=params["remote_port"],
            blocks_expiry_time=params.get("remote_blocks_expiry_time"),
            num_tokens=params.get("remote_num_tokens"),
        )
        self.reqs_to_recv[request_id] = ReqMeta(local_block_ids, params.get("tp_size", 1), remote, awaiting_kvs)


@dataclass(frozen=True)
class EngineMemory:
    """What the engine registers with the worker side, in place of vLLM's cache tensors."""

    pool: BlockPool
    transfer_port: int
    wake: Callable[[], None]
    """Called, from any thread, when a step has something to do."""
    kind_of: Callable[[str], Kind]
    """What the read of a request is."""
    pause_of: Callable[[str], float]
    """Seconds per block of a request's read."""
    read_complete: Callable[[str], None]
    """Told of a request whose read got all its blocks."""


class Connector(ABC):
    """The hooks that the engine calls."""

    engine_id: str
    connector_worker: Any
    connector_scheduler: Any

    @abstractmethod
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None: ...

    @abstractmethod
    def on_new_request(self, request: EngineRequest) -> None: ...

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    @abstractmethod
    def update_state_after_alloc(
        self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata: ...

    @abstractmethod
    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...

    @abstractmethod
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None: ...

    @abstractmethod
    def register_kv_caches(self, kv_caches: dict[str, EngineMemory]) -> None: ...

    @abstractmethod
    def get_handshake_metadata(self) -> Any: ...

    @abstractmethod
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None: ...

    @abstractmethod
    def bind_connector_metadata(self, connector_metadata: NixlConnectorMetadata) -> None: ...

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    @abstractmethod
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults: ...

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> set[int]: ...

    @abstractmethod
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None: ...

    @abstractmethod
    def clear_connector_metadata(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...
