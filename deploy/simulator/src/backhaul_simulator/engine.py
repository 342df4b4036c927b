"""One engine: a data-parallel rank of a simulated vLLM server."""

import asyncio
import importlib
import math
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from backhaul_simulator.connector_base import Connector, EngineMemory, KVConnectorOutput, KVConnectorRole
from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.instruments import Instruments
from backhaul_simulator.kv_events import KVEventPublisher
from backhaul_simulator.model import Model
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.pull_worker import PullConnectorWorker
from backhaul_simulator.requests import EngineDeadError, Output, Request, Stats
from backhaul_simulator.runner import Runner
from backhaul_simulator.scheduler import Results, Scheduler, Step
from backhaul_simulator.transfer import TransferServer
from backhaul_simulator.truth import Truth
from backhaul_simulator.vllm_config import cache_config_of, config_of, port_of

_TICK_S = 0.02
"""How often an engine steps that only waits or retains: vLLM steps without pause then, and sees leases end."""


class Engine:
    """One rank. The process has called `stand_in.use` and `clock.install` before it makes one.

    The side channel and the transfer port listen once it is made; `run` serves until it is cancelled, and closes them.
    ``engine_id`` is new each time.
    """

    def __init__(self, options: EngineOptions, *, rank: int) -> None:
        """Opens the side channel. Raises zmq.ZMQError when its port is taken."""
        self.options = options
        self.rank = rank
        self.engine_id = f"{uuid.uuid4()}_dp{rank}"
        self.max_model_len = min(options.max_model_len, (options.block_count - 1) * options.block_size)
        """Tokens of prompt and answer together; no more than fit into the pool."""
        self.instruments = Instruments()
        self._pool = BlockPool(block_count=options.block_count, block_size=options.block_size)
        model = Model(weights=options.weights, vocabulary=options.vocabulary, end_rate=options.end_rate)
        self._runner = Runner(model, self._pool)
        self._transfers = TransferServer(
            self.engine_id,
            self._pool,
            self.instruments,
            host=options.side_channel_host,
            port=port_of(options.transfer_port, rank),
        )
        scheduler_side, self._worker_side = self._connectors()
        self._scheduler_side = scheduler_side
        self._scheduler = Scheduler(
            options,
            pool=self._pool,
            connector=scheduler_side,
            instruments=self.instruments,
            truth=Truth(model, options.block_size),
            max_model_len=self.max_model_len,
        )
        worker = self._worker_side.connector_worker
        assert isinstance(worker, PullConnectorWorker)
        self._worker = worker
        self._register()
        self._events = self._event_publisher()
        self._added: deque[EngineRequest] = deque()
        self._aborted: deque[str] = deque()
        self._streams: dict[str, asyncio.Queue[Output | Exception]] = {}
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._closed = False

    def _connectors(self) -> tuple[Connector, Connector]:
        envs: Any = importlib.import_module("vllm.envs")
        envs.VLLM_NIXL_SIDE_CHANNEL_HOST = self.options.side_channel_host
        envs.VLLM_NIXL_SIDE_CHANNEL_PORT = self.options.advertised_side_channel_port or self.options.side_channel_port
        # As vLLM loads it with kv_connector_module_path, or without.
        module = "backhaul_connector" if self.options.connector else "backhaul_simulator.stock_connector"
        made: type[Any] = importlib.import_module(module).NixlConnector
        config = config_of(self.options, rank=self.rank, engine_id=self.engine_id)
        cache = cache_config_of(self.options)
        return made(config, KVConnectorRole.SCHEDULER, cache), made(config, KVConnectorRole.WORKER, cache)

    def _register(self) -> None:
        memory = EngineMemory(
            pool=self._pool,
            transfer_port=port_of(self.options.advertised_transfer_port, self.rank) or self._transfers.port,
            wake=self._wake,
            kind_of=self._scheduler.kind_of,
            pause_of=self._pause_of,
            read_complete=self.instruments.read_complete,
        )
        self._worker_side.register_kv_caches({"all": memory})
        payload = self._worker_side.get_handshake_metadata()
        self._scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): payload})

    def _event_publisher(self) -> KVEventPublisher | None:
        if not self.options.kv_events:
            return None
        self._pool.events = []
        return KVEventPublisher(self.options.kv_events, rank=self.rank)

    def _publish_events(self) -> None:
        if self._events is not None and self._pool.events:
            self._events.publish(self._pool.events)
            self._pool.events = []

    def _pause_of(self, req_id: str) -> float:
        asked = self._scheduler.requests[req_id].asked.read_block_s
        return self.options.transfer_block_s if asked is None else asked

    async def run(self) -> None:
        """Schedules until cancelled. Raises what ends the engine: an assertion in a step, as in vLLM.

        Requests in flight then end with EngineDeadError.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._transfers.start()
            while True:
                await self._step()
                await self._pause()
        except Exception as error:
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Closes what the engine opened; for one that never ran. Takes a moment, for its threads to end."""
        if not self._closed:
            self._closed = True
            self._die(EngineDeadError("the engine has stopped"))
            self._transfers.close()
            if self._events is not None:
                self._events.close()
            self._worker_side.shutdown()
            self._scheduler_side.shutdown()

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Runs a request. Closing the iterator (or cancelling the task in it) aborts it: nothing is retained.

        Raises LoadFailedError for KV blocks that could not be loaded, EngineDeadError when the engine has ended,
        ValueError for a request that can never run: without a prompt, or too long.
        """
        self._check(request)
        room = self.max_model_len - len(request.prompt)
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        added = EngineRequest(
            request,
            request_id=request_id,
            max_tokens=min(request.max_tokens, room),
            block_size=self.options.block_size,
        )
        stream: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._streams[request_id] = stream
        self._added.append(added)
        self._wake()
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = isinstance(output, Exception) or output.finish_reason is not None
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            del self._streams[request_id]
            if not finished:
                self._aborted.append(request_id)
                self._wake()

    def _check(self, request: Request) -> None:
        if self._dead is not None:
            raise self._dead
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a request needs a prompt and max_tokens of at least 1")
        if len(request.prompt) >= self.max_model_len:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens; the most is {self.max_model_len - 1}")

    def stats(self) -> Stats:
        """Returns the figures of this moment."""
        scheduler = self._scheduler
        return Stats(
            engine_id=self.engine_id,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.loading) + len(self._added),
            blocks=self._pool.block_count - 1,
            blocks_free=self._pool.free_count,
            prefix_queries=scheduler.counts["prefix_queries"],
            prefix_hits=scheduler.counts["prefix_hits"],
            external_tokens=scheduler.counts["external_tokens"],
            local_tokens=scheduler.counts["local_tokens"],
            prompt_tokens=scheduler.counts["prompt_tokens"],
            generation_tokens=scheduler.counts["generation_tokens"],
            preemptions=scheduler.counts["preemptions"],
            finished=dict(scheduler.finished),
        )

    def ledger(self) -> dict[str, Any]:
        """Returns what the instruments have seen, for JSON."""
        return {
            "engine_id": self.engine_id,
            "rank": self.rank,
            **self.instruments.ledger(list(self._worker._reqs_to_send)),
            "blocks": self._pool.block_count - 1,
            "blocks_free": self._pool.free_count,
            "preemptions": self._scheduler.counts["preemptions"],
        }

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; False (and nothing is done) while a block is in use, as in vLLM."""
        return self._pool.reset_cache()

    async def _step(self) -> None:
        while self._added:
            self._scheduler.add(self._added.popleft())
        if self._aborted:
            self._scheduler.abort([self._aborted.popleft() for _ in range(len(self._aborted))])
        step = self._scheduler.schedule()
        sampled, output = self._execute(step)
        if duration := self._duration(step):
            await asyncio.sleep(duration)
        results = self._scheduler.update(step, sampled, output)
        self._publish_events()
        self._deliver(results)

    def _execute(self, step: Step) -> tuple[dict[str, int | None], KVConnectorOutput]:
        """Computes a step between the worker's hooks, in vLLM's order.

        (``v1/worker/kv_connector_model_runner_mixin.py``.)
        """
        worker = self._worker_side
        worker.bind_connector_metadata(step.metadata)
        for ended in step.in_flight:
            # Blocks that nobody retains have been freed; what would be written there is of no one.
            if ended.block_ids:
                self._runner.run(ended, ended.num_tokens - 1, 1)
            ended.num_in_flight_tokens = 0
        sampled = {
            request.request_id: self._runner.run(request, request.num_computed_tokens - count, count)
            for request, count in step.scheduled
        }
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return sampled, output

    def _duration(self, step: Step) -> float:
        options = self.options
        prefill = step.prefill_tokens / options.prefill_tokens_per_s if options.prefill_tokens_per_s else 0.0
        return prefill + (options.decode_step_s if step.decodes else 0.0)

    def _deliver(self, results: Results) -> None:
        for req_id, output in results:
            stream = self._streams.get(req_id)
            if stream is not None:
                stream.put_nowait(output)

    async def _pause(self) -> None:
        """Lets everything else run; waits while a step could do nothing."""
        if self._scheduler.runnable or self._added or self._aborted:
            await asyncio.sleep(0)
            return
        assert self._loop is not None
        notices = self._worker.notifications.fileno()
        self._loop.add_reader(notices, self._woken.set)
        timer = self._loop.call_later(_TICK_S if self._scheduler.waits else math.inf, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
            self._loop.remove_reader(notices)
        self._woken.clear()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    def _die(self, reason: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = reason
            for stream in self._streams.values():
                stream.put_nowait(reason)
