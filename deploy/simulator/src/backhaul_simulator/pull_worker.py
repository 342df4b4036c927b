"""The worker side of vLLM's NixlConnector (``nixl/base_worker.py``, ``nixl/pull_worker.py``), traps included.

Left out: host buffers, several cache groups, unequal block sizes, tensor and pipeline parallelism, eviction of idle
peers, and the back-off for peers whose NIXL metadata was invalidated.
"""

import hashlib
import logging
import queue
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from backhaul_simulator.connector_base import (
    EngineMemory,
    HeartbeatInfo,
    KVConnectorTransferResults,
    NixlConnectorMetadata,
    ReqMeta,
)
from backhaul_simulator.leases import Leases
from backhaul_simulator.notifications import NixlError, nixl_agent, nixl_agent_config
from backhaul_simulator.side_channel import NixlAgentMetadata, NixlHandshakePayload, handshake
from backhaul_simulator.transfer import Peer, Read, ReadRequest
from backhaul_simulator.vllm_config import VllmConfig

_log = logging.getLogger(__name__)

_EXPIRY_SAFETY_MARGIN_S = 5.0
"""``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN``: a claimed read that would start later than this before its deadline fails."""

_Handshake = tuple[NixlAgentMetadata, float]


class _Remote:
    """A remote engine after the handshake."""

    def __init__(self, name: str, metadata: NixlAgentMetadata, clock_offset: float, peer: Peer) -> None:
        self.name = name
        self.metadata = metadata
        self.clock_offset = clock_offset
        self.peer = peer


class PullConnectorWorker:
    """Starts reads, sees them end, and keeps the leases."""

    tp_rank = 0

    def __init__(self, config: VllmConfig, engine_id: str) -> None:
        get = config.kv_transfer_config.get_from_extra_config
        self._engine_id = engine_id
        self._bidirectional: bool = get("bidirectional_kv_xfer", False)
        self._block_size = config.cache_config.block_size
        self._compatibility_hash = hashlib.sha256(f"0.32.0:14:{config.model_config.model}:pull".encode()).hexdigest()
        self._agent = nixl_agent(
            str(uuid.uuid4()),
            nixl_agent_config(
                listen_host=config.ports.host,
                listen_port=config.ports.notifications,
                advertised_port=config.ports.advertised_notifications,
            ),
        )
        self._leases = Leases(get("kv_lease_duration", 30) * 2 // 3)
        self._reqs_to_send = self._leases.deadlines
        """vLLM's name, which Backhaul's connector reads."""
        self._memory: EngineMemory | None = None
        self._remotes: dict[str, _Remote] = {}
        self._engine_by_address: dict[tuple[str, int], str] = {}
        self._handshakes: dict[str, Future[_Handshake]] = {}
        self._handshaken: queue.SimpleQueue[tuple[str, str, int, Future[_Handshake]]] = queue.SimpleQueue()
        self._waiting_for: dict[str, list[tuple[str, ReqMeta]]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="nixl-handshake-initiator")
        self._receiving: dict[str, ReqMeta] = {}
        self._transfers: dict[str, Read | None] = {}
        self._failures: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._last_read_id = 0

    @property
    def notifications(self) -> nixl_agent:
        """Where notifications arrive."""
        return self._agent

    def register_kv_caches(self, memory: EngineMemory) -> NixlHandshakePayload:
        """Takes the engine's memory; returns what the side channel answers."""
        self._memory = memory
        metadata = NixlAgentMetadata(
            engine_id=self._engine_id,
            agent_metadata=self._agent.get_agent_metadata(),
            num_blocks=memory.pool.block_count,
            block_size=self._block_size,
            transfer_port=memory.transfer_port,
        )
        return NixlHandshakePayload(self._compatibility_hash, msgspec.msgpack.encode(metadata))

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Starts what a step orders: reads, notifications, leases, heartbeats."""
        for req_id, meta in metadata.reqs_to_recv.items():
            if meta.awaiting_kvs or any(meta.local_block_ids):
                self._receiving[req_id] = meta
            self._read_for(req_id, meta)
        self._finish_handshakes()
        self._leases.batch(metadata.reqs_in_batch)
        self._leases.drop(metadata.reqs_not_processed)
        self._leases.send(metadata.reqs_to_send, metadata.scheduler_clock, time.perf_counter())
        for engine_id, info in metadata.heartbeat_by_engine.items():
            self._send_heartbeat(engine_id, info)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Returns what has ended since the last step, in vLLM's order: notices, reads, expired leases."""
        sent: set[str] = set()
        for messages in self._agent.get_new_notifs().values():
            sent |= self._leases.notified(messages, time.perf_counter())
        done, failed = self._ended_reads()
        for req_id in done:
            meta = self._receiving.pop(req_id)
            if req_id in failed:
                self._invalid_block_ids.update(meta.local_block_ids[0])
        if self._reqs_to_send:
            sent |= self._leases.expired(time.perf_counter())
        return KVConnectorTransferResults(sent, done, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns, once, the blocks of failed reads."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def shutdown(self) -> None:
        """Ends reads and closes what is open."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for remote in self._remotes.values():
            remote.peer.close()
        self._agent.close()

    def _ended_reads(self) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        for req_id, read in list(self._transfers.items()):
            if read is None or read.state != "PROC":
                del self._transfers[req_id]
                done.add(req_id)
                if read is not None and read.state == "ERR":
                    self._failures.add(req_id)
        failed: set[str] = set()
        for req_id in tuple(self._failures):
            if req_id not in self._transfers:
                self._failures.remove(req_id)
                # A notification alone is awaited by nobody: whether it failed does not matter.
                if req_id in self._receiving:
                    failed.add(req_id)
        return (done | failed) & self._receiving.keys(), failed

    def _read_for(self, req_id: str, meta: ReqMeta) -> None:
        remote = self._remotes.get(meta.remote.engine_id)
        if remote is None:
            self._waiting_for.setdefault(meta.remote.engine_id, []).append((req_id, meta))
            self._shake_hands(meta.remote.engine_id, meta.remote.host, meta.remote.port)
        elif self._bidirectional and self._is_expired(remote, meta):
            _log.warning("declining expired remote read for %s from engine %s", req_id, meta.remote.engine_id)
            self._failures.add(req_id)
        else:
            self._read(req_id, remote, meta)

    def _is_expired(self, remote: _Remote, meta: ReqMeta) -> bool:
        # Looked at once, before the read; skipped without a deadline, and where nothing is read.
        expiry = meta.remote.blocks_expiry_time
        if expiry is None or not meta.local_block_ids:
            return False
        return time.perf_counter() + _EXPIRY_SAFETY_MARGIN_S >= expiry - remote.clock_offset

    def _read(self, req_id: str, remote: _Remote, meta: ReqMeta) -> None:
        assert self._memory is not None
        notice = f"{meta.remote.request_id}:1".encode()
        if not any(meta.local_block_ids):
            self._notify(remote, notice)
            if meta.awaiting_kvs:
                self._transfers[req_id] = None
            return
        (local,), (theirs,) = meta.local_block_ids, meta.remote.block_ids
        # The last of the holder's blocks, whatever the tokens (``_apply_prefix_caching``).
        assert len(local) <= len(theirs), f"{len(local)} blocks to read, {len(theirs)} there"
        theirs = list(theirs[-len(local) :])
        memory = self._memory

        def ended(read: Read) -> None:
            if read.state == "DONE":
                self._notify(remote, notice)
                memory.read_complete(req_id)
            memory.wake()

        self._last_read_id += 1
        read = Read(local, ended)
        self._transfers[req_id] = read
        remote.peer.start(
            ReadRequest(
                self._last_read_id,
                meta.remote.request_id,
                f"{self._engine_id}/{req_id}",
                memory.kind_of(req_id),
                memory.pause_of(req_id),
                theirs,
            ),
            read,
        )

    def _notify(self, remote: _Remote, notice: bytes) -> None:
        try:
            self._agent.send_notif(remote.name, notice)
        except NixlError as error:
            _log.warning("notification not sent; the blocks are freed after their time: %s", error)

    def _send_heartbeat(self, engine_id: str, info: HeartbeatInfo) -> None:
        remote = self._remotes.get(engine_id)
        if remote is None:
            # The next heartbeat will find it.
            self._shake_hands(engine_id, info.host, info.port)
            return
        self._notify(remote, ("HB:" + ",".join(info.req_ids)).encode())

    def _shake_hands(self, engine_id: str, host: str, port: int) -> None:
        if engine_id in self._handshakes:
            return
        future = self._executor.submit(
            handshake, host, port, compatibility_hash=self._compatibility_hash, engine_id=engine_id
        )
        self._handshakes[engine_id] = future

        def done(future: Future[_Handshake]) -> None:
            self._handshaken.put((engine_id, host, port, future))
            if self._memory is not None:
                self._memory.wake()

        future.add_done_callback(done)

    def _finish_handshakes(self) -> None:
        """Goes on with what waited for handshakes. A failed one fails them; the next request tries again."""
        while not self._handshaken.empty():
            engine_id, host, port, future = self._handshaken.get_nowait()
            del self._handshakes[engine_id]
            waiting = self._waiting_for.pop(engine_id, [])
            try:
                metadata, clock_offset = future.result()
            except Exception as error:  # noqa: BLE001 - whatever it was, the requests that waited for it fail
                _log.warning("handshake with engine %s failed: %s", engine_id, error)
                self._failures.update(req_id for req_id, _ in waiting)
                continue
            self._meet(engine_id, host, port, metadata, clock_offset)
            for req_id, meta in waiting:
                self._read_for(req_id, meta)

    def _meet(self, engine_id: str, host: str, port: int, metadata: NixlAgentMetadata, clock_offset: float) -> None:
        assert self._memory is not None
        name = self._agent.add_remote_agent(metadata.agent_metadata)
        peer = Peer(host, metadata.transfer_port, engine_id, self._memory.pool)
        self._remotes[engine_id] = _Remote(name, metadata, clock_offset, peer)
        previous = self._engine_by_address.get((host, port))
        self._engine_by_address[host, port] = engine_id
        # An engine that another one has replaced is dropped (``_cleanup_remote_engines``); its reads are over, failed.
        if previous not in (None, engine_id) and (old := self._remotes.pop(previous or "", None)) is not None:
            old.peer.close()
            self._agent.remove_remote_agent(old.name)
