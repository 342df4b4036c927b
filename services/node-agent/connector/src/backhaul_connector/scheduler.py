"""The connector's state in the scheduler process. Everything here runs in the engine's loop: nothing waits."""

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm import envs

from backhaul_connector import __version__, decode, engine, handles, prefill, wire
from backhaul_connector.anchors import identity_of
from backhaul_connector.clocks import RemoteClocks
from backhaul_connector.digesting import Digester
from backhaul_connector.handles import Handles
from backhaul_connector.leases import ConfirmedDeadlines
from backhaul_connector.ledger import Ledger
from backhaul_connector.link import AgentLink
from backhaul_connector.memory import BlockPool, MemoryWatcher
from backhaul_connector.settings import Settings
from backhaul_connector.snapshot import LeaseSnapshot
from backhaul_connector.weights import WeightsDigests, digest_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.backhaul")

_MODEL = ""
"""Source of the served model among the weights digests; adapters are named by number and folder."""


class SchedulerSide:
    """State of the connector in the scheduler process."""

    def __init__(
        self,
        config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        engine_id: str,
        settings: Settings,
        problem: str,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._engine_id = engine_id
        self._settings = settings
        self._problem = problem
        self._block_size: int = config.cache_config.block_size
        self._lease_s = engine.lease_s(config)
        self._layout = prefill.Layout(self._block_size, engine.trims(config, kv_cache_config))
        self._digester = Digester()
        self._turns: dict[str, decode.OpenTurn] = {}
        self._unreported: dict[str, decode.OpenTurn] = {}
        """Turns that have ended and are not digested to their end yet."""
        self._verdicts: dict[str, wire.Verdict] = {}
        # Every rank of the engine holds its own lease; ranks of other pipeline stages share a number, and none counts.
        self._deadlines = ConfirmedDeadlines(config.parallel_config.world_size)
        self._digests = WeightsDigests(self._digest)
        self.clocks = RemoteClocks()
        self._handles = Handles(self.clocks)
        group_count = len(kv_cache_config.kv_cache_groups)
        self._memory = MemoryWatcher(self._block_size, group_count, engine.whole_prompt_tokens(config))
        self._ledger = Ledger(wake=lambda: self._link.wake(), max_queued=settings.max_queued)
        self._link = AgentLink(settings.agent_socket, self._ledger, self._hello)

    def start(self) -> None:
        """Starts the threads."""
        self._digests.get(_MODEL, done=self._say_identity)
        if self._settings.agent_socket:
            self._link.start()

    def stop(self) -> None:
        """Ends the threads."""
        if self._settings.agent_socket:
            self._link.stop()
        self.clocks.stop()

    def bind(self, pool: BlockPool) -> None:
        self._memory.bind(pool)

    def arrived(self, request: "Request") -> None:
        self._memory.arrived(request.request_id, request.num_tokens)

    def asked(self, request: "Request", local: int, external: int | None, asynchronous: bool) -> None:
        # What is read first is computed in a later step.
        now = 0 if asynchronous else request.num_tokens - local - (external or 0)
        self._memory.asked(request.request_id, request.num_tokens, computed_now=now)

    def left(self, request: "Request") -> None:
        self._memory.left(request.request_id)
        self._digester.drop(request.request_id)

    def stepped(self, planned: int) -> None:
        """Digests a bit, and takes note of how full the engine is, when a step of so many tokens is planned."""
        self._digester.stepped()
        if (memory := self._memory.stepped(time.perf_counter(), planned=planned)) is not None:
            self._ledger.memory(memory)

    def admit(self, request: "Request") -> None:
        params = request.kv_transfer_params
        # vLLM may share one dictionary between the requests of a call: what follows changes a copy.
        if params.get("do_remote_decode"):
            self._admit_prefill(request, dict(params))
        elif (label := decode.label_of(params)) is not None:
            request.kv_transfer_params = dict(params)
            self._admit_decode(request, label)

    def proved(self, request_id: str) -> bool:
        """Tells whether it is known what of a request's handle can be used; while it is not, that goes on."""
        return self._digester.finished(request_id)

    def matched(self, request_id: str, local: int) -> None:
        if (verdict := self._verdicts.get(request_id)) is not None:
            self._verdicts[request_id] = msgspec.structs.replace(verdict, local=local)

    def allocated(self, request: "Request", external: int) -> None:
        self._memory.left(request.request_id)
        params = request.kv_transfer_params
        if not params or params.get("_remote_blocks_processed"):
            return
        if (verdict := self._verdicts.get(request.request_id)) is not None:
            # Of a request that skips its own cache vLLM does not care what can be read (``v1/core/sched/scheduler.py``,
            # ``skip_reading_prefix_cache``): it runs, and what would be proved from now on must not be read any more.
            refused = "unproved" if self._digester.drop(request.request_id) else verdict.refused
            spent = verdict.spent or bool(params.get("remote_block_ids"))
            self._verdicts[request.request_id] = msgspec.structs.replace(
                verdict, read=external, spent=spent, refused=refused
            )
        elif decode.label_of(params) is not None and external == 0:
            params["do_remote_prefill"] = True

    def hand_off_deadline(self, now: float) -> float:
        """Returns until when the blocks of a prefill request that ends ``now`` are kept, in this process's clock.

        vLLM keeps a hand-off as long (``nixl/pull_scheduler.py``, ``request_finished``), but does not say so. Where a
        deadline is, the decode engine's worker declines a read that would start in its last five seconds or later
        (``nixl/pull_worker.py``, ``_is_turn2_read_expired``), and its fence fails one that ends after it. Heartbeats of
        the decode engine make the lease longer; nobody confirms them, so they do not count.
        """
        return now + self._lease_s

    def with_verdict(self, request_id: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        verdict = self._verdicts.pop(request_id, None)
        if params is None or verdict is None:
            return params
        return {**params, wire.PARAMS_KEY: msgspec.to_builtins(verdict)}

    def closing(self, request: "Request") -> decode.OpenTurn | None:
        """Returns the turn if its blocks are to be retained, None if they are to be freed at once.

        While requests wait for blocks nothing is: they would wait until the agent has heard of it and released it.
        """
        turn = self._turns.pop(request.request_id, None)
        if self._memory.waits:
            return None
        # A step still in flight writes into the last block: what a reader would find there is not certain yet.
        return None if request.num_in_flight_tokens and not self._layout.trims else turn

    def retained(self, turn: decode.OpenTurn, request: "Request", params: dict[str, Any]) -> None:
        params = decode.settled(params, request.num_in_flight_tokens, self._block_size)
        if not turn.close(params, params["remote_blocks_expiry_time"], now=time.perf_counter()):
            _log.warning("Backhaul: a turn ended with fewer tokens than were digested; it is not reported")
            return
        self._unreported[request.request_id] = turn
        self._digester.finish(request.request_id, turn, partial(self._report, request.request_id))

    def output(self, connector_output: "KVConnectorOutput") -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, LeaseSnapshot):
            self._confirm(self._deadlines.update(meta.moved))
            self._ledger.leases(meta.counts)
        if connector_output.finished_sending:
            self._deadlines.forget(connector_output.finished_sending)
            self._forget(connector_output.finished_sending)
            self._ledger.freed(connector_output.finished_sending)

    def _report(self, set_id: str) -> None:
        self._ledger.retained(self._unreported.pop(set_id).report())

    def _confirm(self, deadlines: Mapping[str, float]) -> None:
        for set_id in deadlines.keys() & self._unreported.keys():
            self._unreported[set_id].deadline = deadlines[set_id]
        self._ledger.deadlines(deadlines)

    def _forget(self, set_ids: Iterable[str]) -> None:
        for set_id in self._unreported.keys() & set_ids:
            del self._unreported[set_id]
            self._digester.drop(set_id)

    def _admit_prefill(self, request: "Request", params: dict[str, Any]) -> None:
        self._verdicts[request.request_id] = wire.Verdict(prompt=request.num_prompt_tokens, local=0, read=0)
        request.kv_transfer_params = params
        if not params.get("remote_block_ids"):
            # With it, and no blocks to read, vLLM promises the whole prompt and trips over its own assertion.
            params["do_remote_prefill"] = False
            return
        # Until it is proved there is no handle: a request that is aborted meanwhile must not touch the set.
        request.kv_transfer_params = prefill.without_handle(params)
        proof = prefill.Proof(params, self._prompt(request, params), self._layout, self._settings.min_verified)
        self._digester.finish(request.request_id, proof, partial(self._proved, request, params, proof))

    def _prompt(self, request: "Request", params: dict[str, Any]) -> prefill.Prompt:
        proof = prefill.proof_of(params)
        return prefill.Prompt(
            request.prompt_token_ids or (),
            engine.extras_of(request),
            self._identity(request, proof.scope if proof else ""),
        )

    def _proved(self, request: "Request", params: dict[str, Any], proof: prefill.Proof) -> None:
        judgement = proof.judgement()
        refusal = judgement.refused or self._handles.refuses(judgement.params, time.perf_counter())
        used = judgement.params if not refusal else prefill.without_handle(params)
        request.kv_transfer_params = used
        self._verdicts[request.request_id] = msgspec.structs.replace(
            self._verdicts[request.request_id],
            verified=judgement.verified,
            refused=refusal,
            # A handle that comes again was sent twice. The first leg may be reading: the set must not be granted anew.
            spent=refusal == handles.USED,
        )

    def _admit_decode(self, request: "Request", label: wire.TurnLabel) -> None:
        turn = decode.opened(
            label,
            identity=self._identity(request, label.scope),
            tokens=request.all_token_ids,
            extras=engine.extras_of(request),
            block_size=self._block_size,
            now=time.perf_counter(),
        )
        if turn is not None:
            self._turns[request.request_id] = turn
            self._digester.follow(request.request_id, turn)

    def _identity(self, request: "Request", scope: str) -> bytes | None:
        weights = self._digests.get(_MODEL)
        lora = request.lora_request
        # vLLM gives an adapter that is loaded anew a new number: its files may have changed under the same path.
        source = f"{lora.lora_int_id}:{lora.lora_path}" if lora is not None else ""
        adapter = self._digests.get(source) if lora is not None and not lora.load_inplace else ""
        if weights is None or adapter is None or (lora is not None and lora.load_inplace):
            return None
        return identity_of(
            weights_digest=weights,
            adapter=f"{lora.lora_name}:{adapter}" if lora is not None else "",
            cache_salt=request.cache_salt or "",
            scope=scope,
        )

    def _digest(self, source: str) -> str:
        if source != _MODEL:
            return digest_folder(Path(source.partition(":")[2]))
        return self._settings.weights_digest or engine.digest_model(self._config)

    def _say_identity(self) -> None:
        digest, problem = self._digests.get(_MODEL) or "", self._digests.problem(_MODEL)
        if problem:
            _log.error("Backhaul: no reuse on this engine: the weights cannot be digested: %s", problem)
        self._ledger.identify(wire.Identity(weights_digest=digest, problem=problem))

    def _hello(self, last_session: str) -> wire.Hello:
        transfer = self._config.kv_transfer_config
        parallel = self._config.parallel_config
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            engine_id=self._engine_id,
            rank=parallel.data_parallel_index,
            connector_version=__version__,
            vllm_version=vllm.__version__,
            problem=self._problem or self._digests.problem(_MODEL),
            weights_digest=self._digests.get(_MODEL) or "",
            block_size=self._block_size,
            block_count=self._kv_cache_config.num_blocks,
            tp_size=parallel.tensor_parallel_size,
            kv_head_count=engine.divided_heads(self._config, self._kv_cache_config),
            ttl_s=float(transfer.get_from_extra_config("decoder_kv_blocks_ttl", 480)),
            lease_s=self._lease_s,
            recompute_threshold=int(transfer.get_from_extra_config("kv_recompute_threshold", 64)),
            side_channel_host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            side_channel_port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
            now=time.perf_counter(),
            last_session=last_session,
        )
