"""The scheduler side of vLLM's NixlConnector (``nixl/base_scheduler.py``, ``nixl/pull_scheduler.py``), traps included.

Left out: host buffers, several cache groups, tensor and pipeline parallelism, speculative decoding.
"""

import time
from collections.abc import Sequence
from typing import Any

from backhaul_simulator.connector_base import HeartbeatInfo, KVCacheBlocks, KVConnectorOutput, NixlConnectorMetadata
from backhaul_simulator.engine_request import EngineRequest, RequestStatus
from backhaul_simulator.side_channel import HandshakeListener, NixlHandshakePayload
from backhaul_simulator.vllm_config import VllmConfig

_REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class PullConnectorScheduler:
    """Decides what is read, what is retained, and what the worker is told."""

    def __init__(self, config: VllmConfig, engine_id: str, *, host: str, port: int) -> None:
        """``host`` and ``port`` are what others are told of this rank's side channel."""
        get = config.kv_transfer_config.get_from_extra_config
        self._engine_id = engine_id
        self._host = host
        self._port = port
        self._listening_port = config.ports.side_channel
        self._lease_s: float = get("kv_lease_duration", 30)
        self._heartbeat_interval_s = self._lease_s // 6
        self._recompute_threshold = int(get("kv_recompute_threshold", 64))
        self._bidirectional: bool = get("bidirectional_kv_xfer", False)
        self._ttl_s: float = get("decoder_kv_blocks_ttl", 480)
        self._listener: HandshakeListener | None = None
        self._need_recv: dict[str, tuple[dict[str, Any], Sequence[Sequence[int]], bool]] = {}
        self._need_send: dict[str, float] = {}
        self._in_batch: set[str] = set()
        self._not_processed: set[str] = set()
        self._heartbeats: dict[str, HeartbeatInfo] = {}
        self._heartbeat_of: dict[str, tuple[str, str]] = {}
        self._last_heartbeat = 0.0

    def listen(self, payload: NixlHandshakePayload) -> None:
        """Opens the side channel (``set_xfer_handshake_metadata``)."""
        self._listener = HandshakeListener(self._host, self._listening_port, payload)

    def shutdown(self) -> None:
        """Closes the side channel."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None

    def on_new_request(self, request: EngineRequest) -> None:
        """Tracks a request whose hand-off has to be kept alive at the prefill engine until it is read."""
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_prefill"):
            return
        values: list[Any] = [params.get(name) for name in (*_REMOTE_FIELDS, "tp_size")]
        if None in values:
            return
        engine_id, request_id, host, port, tp_size = values
        info = self._heartbeats.setdefault(engine_id, HeartbeatInfo(set(), host, port, tp_size))
        info.req_ids.add(request_id)
        self._heartbeat_of[request.request_id] = (engine_id, request_id)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Promises tokens of another engine; compares nothing."""
        params = request.kv_transfer_params
        if params is None:
            return 0, False
        if params.get("do_remote_prefill"):
            count = request.num_prompt_tokens - num_computed_tokens
            if count > 0:
                return count, True
        if (
            params.get("do_remote_decode")
            and params.get("remote_block_ids")
            and all(name in params for name in _REMOTE_FIELDS)
        ):
            remote = params.get("remote_num_tokens") or 0
            count = min(remote, request.num_prompt_tokens) - num_computed_tokens
            if count > 0 and count >= self._recompute_threshold:
                return count, True
        return 0, False

    def update_state_after_alloc(self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Orders the read, once per request. With nothing to read the holder is notified all the same, and frees.

        A request for which neither flag is set by now is not tracked by the worker: what it retains is pinned for ever.
        """
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode") or (params.get("do_remote_prefill") and self._bidirectional):
            self._in_batch.add(request.request_id)
        if not (
            params.get("do_remote_prefill")
            or (params.get("do_remote_decode") and self._bidirectional and not params.get("_remote_blocks_processed"))
        ):
            return
        if not params.get("remote_block_ids"):
            assert num_external_tokens == 0
        elif all(name in params for name in _REMOTE_FIELDS):
            local = blocks.get_unhashed_block_ids_all_groups() if num_external_tokens > 0 else ()
            self._need_recv[request.request_id] = (params, local, num_external_tokens > 0)
        params["do_remote_prefill"] = False
        params["_remote_blocks_processed"] = True

    def request_finished(
        self, request: EngineRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Says whether the blocks are kept for a reader, and with which handle."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        hands_off = bool(params.get("do_remote_decode"))
        self._stop_heartbeat(request.request_id)
        if params.get("do_remote_prefill"):
            # Aborted before it was scheduled: the worker notifies the prefill engine, which frees its blocks.
            self._need_recv[request.request_id] = (params, [], False)
            params["do_remote_prefill"] = False
            return False, None
        if not hands_off and not self._bidirectional:
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            self._not_processed.add(request.request_id)
            return False, None
        keeps = any(block_ids)
        expiry = None
        if keeps:
            deadline = time.perf_counter() + (self._lease_s if hands_off else self._ttl_s)
            self._need_send[request.request_id] = deadline
            expiry = None if hands_off else deadline
        return keeps, {
            "do_remote_prefill": hands_off,
            "do_remote_decode": not hands_off,
            "remote_block_ids": block_ids,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._host,
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.num_computed_tokens if keeps else 0,
            "remote_blocks_expiry_time": expiry,
            "transfer_mode": "pull",
        }

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        """Gathers a step's news for the worker."""
        meta = NixlConnectorMetadata()
        for req_id, (params, local, awaiting) in self._need_recv.items():
            meta.add_new_req_to_recv(req_id, local, params, awaiting)
        now = time.perf_counter()
        meta.reqs_to_send = self._need_send
        meta.scheduler_clock = now
        meta.reqs_in_batch = self._in_batch
        meta.reqs_not_processed = self._not_processed
        if self._heartbeats and now - self._last_heartbeat >= self._heartbeat_interval_s:
            self._last_heartbeat = now
            meta.heartbeat_by_engine = self._heartbeats
        self._need_recv = {}
        self._need_send = {}
        self._in_batch = set()
        self._not_processed = set()
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Ends the heartbeats of requests whose hand-off has been read."""
        for req_id in connector_output.finished_recving or ():
            self._stop_heartbeat(req_id)

    def _stop_heartbeat(self, req_id: str) -> None:
        engine_id, remote_id = self._heartbeat_of.pop(req_id, ("", ""))
        info = self._heartbeats.get(engine_id)
        if info is not None:
            info.req_ids.discard(remote_id)
            if not info.req_ids:
                del self._heartbeats[engine_id]
