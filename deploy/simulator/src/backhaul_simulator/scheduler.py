"""Which requests run in a step, on which blocks, and what becomes of its output (``v1/core/sched/scheduler.py``).

First come, first served; chunked prefill; the latest running request gives way when blocks lack. A request whose blocks
are read from another engine holds them and waits beside the queue. What finished requests retain keeps its blocks until
the connector says that they were sent.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from backhaul_simulator.connector_base import Connector, KVCacheBlocks, KVConnectorOutput, NixlConnectorMetadata
from backhaul_simulator.engine_request import FINISH_REASONS, EngineRequest, RequestStatus
from backhaul_simulator.instruments import Instruments
from backhaul_simulator.model import END
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.prefix_cache import BlockManager
from backhaul_simulator.requests import LoadFailedError, Output
from backhaul_simulator.transfer import Kind
from backhaul_simulator.truth import Truth


@dataclass(slots=True)
class Step:
    """What a step computes: requests, and how many tokens of each."""

    scheduled: list[tuple[EngineRequest, int]] = field(default_factory=list)
    metadata: NixlConnectorMetadata = field(default_factory=NixlConnectorMetadata)
    finished_req_ids: set[str] = field(default_factory=set)
    in_flight: list[EngineRequest] = field(default_factory=list)
    """Requests that have ended, and whose last token is computed all the same."""
    prefill_tokens: int = 0
    """Tokens of prompts among them."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of all of them."""
        return sum(count for _, count in self.scheduled)

    @property
    def decodes(self) -> bool:
        """Whether an answer goes on in it."""
        return any(request.num_output_tokens for request, _ in self.scheduled)


Results = list[tuple[str, Output | LoadFailedError]]
"""By request id: its next output."""


class Scheduler:
    """The requests of one engine."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        pool: BlockPool,
        connector: Connector,
        instruments: Instruments,
        truth: Truth,
        max_model_len: int,
    ) -> None:
        self._options = options
        self._pool = pool
        self._manager = BlockManager(pool)
        self._connector = connector
        self._instruments = instruments
        self._truth = truth
        self._max_model_len = max_model_len
        self.requests: dict[str, EngineRequest] = {}
        """All that hold something, finished ones that retain their blocks included."""
        self.running: list[EngineRequest] = []
        self.waiting: deque[EngineRequest] = deque()
        self.loading: deque[EngineRequest] = deque()
        """Requests that wait with blocks of theirs: for a read, or for their first step after it."""
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self._loaded: set[str] = set()
        self._news = False
        self._undecided = False
        """Whether the connector did not know yet what can be read of a request."""
        self._finished_req_ids: set[str] = set()
        self._in_flight: list[EngineRequest] = []
        connector.bind_gpu_block_pool(pool)

    @property
    def retains(self) -> bool:
        """Whether finished requests keep blocks."""
        return len(self.requests) > len(self.running) + len(self.waiting) + len(self.loading)

    @property
    def waits(self) -> bool:
        """Whether a step may change something though nothing runs: a read may end, blocks may be freed."""
        return bool(self.requests)

    @property
    def runnable(self) -> bool:
        """Whether the next step certainly has something to do."""
        return bool(self.running or self._finished_req_ids or self._news or self._undecided)

    def add(self, request: EngineRequest) -> None:
        """Takes a request (``add_request``)."""
        self.waiting.append(request)
        self.requests[request.request_id] = request
        self._connector.on_new_request(request)

    def abort(self, req_ids: Iterable[str]) -> None:
        """Ends requests whose clients left."""
        self._finish(req_ids, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Step:
        """Plans a step."""
        step = Step()
        self._news = self._undecided = False
        budget = self._options.max_step_tokens
        budget, preempted = self._schedule_running(step, budget)
        if not preempted:
            self._admit(step, budget)
        step.metadata = self._connector.build_connector_meta(step)
        step.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        step.in_flight, self._in_flight = self._in_flight, []
        for request, count in step.scheduled:
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
        return step

    def update(self, step: Step, sampled: Mapping[str, int | None], output: KVConnectorOutput) -> Results:
        """Takes what a step gave, in vLLM's order: failed reads, tokens, ended transfers (``update_from_output``)."""
        results: Results = []
        failed = self._failed_loads(output)
        for request, count in step.scheduled:
            request.num_in_flight_tokens -= count
            if RequestStatus.is_finished(request.status) or request.request_id in failed:
                continue
            token = sampled[request.request_id]
            if token is not None:
                results.append((request.request_id, self._append(request, token)))
        self.running = [r for r in self.running if not RequestStatus.is_finished(r.status)]
        for req_id in failed:
            self._instruments.read_failed(req_id, self.kind_of(req_id))
            results.append((req_id, LoadFailedError(req_id)))
        self._finish(failed, RequestStatus.FINISHED_ERROR)
        self._transfers_ended(output)
        return results

    def _schedule_running(self, step: Step, budget: int) -> tuple[int, bool]:
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._manager.allocate(request, request.num_computed_tokens + count):
                victim = self.running.pop()
                self._preempt(victim)
                self._instruments.lacks_blocks(victim.request_id)
                preempted = True
                if victim is request:
                    return budget, preempted
            self._run(step, request, count)
            budget -= count
            index += 1
        return budget, preempted

    def _preempt(self, request: EngineRequest) -> None:
        self._manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def _run(self, step: Step, request: EngineRequest, count: int) -> None:
        step.scheduled.append((request, count))
        step.prefill_tokens += min(count, max(0, request.num_prompt_tokens - request.num_computed_tokens))

    def _admit(self, step: Step, budget: int) -> None:
        """Starts requests that wait: those with blocks first, then in order until one does not fit."""
        unfit: deque[EngineRequest] = deque()
        while self.loading and budget > 0 and len(self.running) < self._options.max_running:
            request = self.loading.popleft()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and not self._promote(request):
                unfit.append(request)
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._manager.allocate(request, request.num_computed_tokens + count, fit_tokens=request.num_tokens):
                unfit.append(request)
                self.loading = unfit + self.loading
                self._instruments.lacks_blocks(request.request_id)
                return
            # The connector is told of every allocation; it orders a read only the first time.
            self._connector.update_state_after_alloc(request, KVCacheBlocks(self._pool, request.block_ids), 0)
            self._start(step, request, count)
            budget -= count
        self.loading = unfit + self.loading
        skipped: deque[EngineRequest] = deque()
        while self.waiting and budget > 0 and len(self.running) < self._options.max_running:
            admitted = self._admit_first(step, budget, skipped)
            if admitted is None:
                break
            budget -= admitted
        self.waiting = skipped + self.waiting
        self._undecided = bool(skipped)

    def _admit_first(self, step: Step, budget: int, skipped: deque[EngineRequest]) -> int | None:
        """Admits the first request that waits; returns the tokens that it computes now, None when it does not fit.

        One of which the connector does not know yet what can be read goes to those that are skipped in this step.
        """
        request = self.waiting[0]
        cached = self._manager.find(request)
        local = len(cached) * self._pool.block_size
        external, asynchronous = self._connector.get_num_new_matched_tokens(request, local)
        if external is None:
            skipped.append(self.waiting.popleft())
            return 0
        computed = local + external
        assert computed <= request.num_tokens
        count = 0 if asynchronous else min(request.num_tokens - computed, budget)
        if not self._manager.allocate(
            request,
            computed + count,
            cached=cached,
            fit_tokens=request.num_tokens,
            reserved=self._reserved_blocks() if asynchronous else 0,
            cache=not asynchronous,
        ):
            self._instruments.lacks_blocks(request.request_id)
            return None
        self.waiting.popleft()
        self._connector.update_state_after_alloc(request, KVCacheBlocks(self._pool, request.block_ids), external)
        self._count_prompt(request, local, external)
        request.num_computed_tokens = computed
        if asynchronous:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self._instruments.started[self.kind_of(request.request_id)] += 1
            self.loading.append(request)
            return 0
        self._start(step, request, count)
        return count

    def _start(self, step: Step, request: EngineRequest, count: int) -> None:
        self._instruments.has_blocks(request.request_id)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._run(step, request, count)

    def _count_prompt(self, request: EngineRequest, local: int, external: int) -> None:
        self.counts["prefix_queries"] += request.num_tokens
        self.counts["prefix_hits"] += local
        request.local_tokens = local
        if not request.num_preemptions:
            request.external_tokens = external
            request.cached_tokens = local + external

    def _reserved_blocks(self) -> int:
        """Blocks that prompts under way will still need: a read must not take them (``_inflight_prefill_...``)."""
        size = self._pool.block_size
        return sum(
            -(-request.num_tokens // size) - len(request.block_ids)
            for request in (*self.running, *self.loading)
            if request.num_computed_tokens < request.num_tokens
        )

    def kind_of(self, req_id: str) -> Kind:
        """Tells what the read of a request is."""
        params = self.requests[req_id].kv_transfer_params
        return "claimed" if params and params.get("do_remote_decode") else "handoff"

    def _promote(self, request: EngineRequest) -> bool:
        """Goes on with a request whose read has ended well; False while it goes on (``_update_waiting_for_remote_kv``).

        Its full blocks become known to the prefix cache only now.
        """
        if request.request_id not in self._loaded:
            return False
        self._loaded.remove(request.request_id)
        self._instruments.read_used(
            request.request_id, self.kind_of(request.request_id), true=self._content_is_true(request)
        )
        self._manager.cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            # The last token is computed anew: the next one comes from it.
            request.num_computed_tokens -= 1
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        return True

    def _content_is_true(self, request: EngineRequest) -> bool:
        first, end = request.local_tokens, request.num_computed_tokens
        size = self._pool.block_size
        blocks = request.block_ids[first // size : -(-end // size)]
        true = self._truth.content(request, first, end)
        return b"".join(map(self._pool.read, blocks))[: len(true)] == true

    def _append(self, request: EngineRequest, token: int) -> Output:
        may_stop = request.may_stop
        request.all_token_ids.append(token)
        self.counts["generation_tokens"] += 1
        if request.num_output_tokens == 1:
            # Only now: what was never computed to its end, for want of a read, counts nowhere (`take_prefill_stats`).
            self.counts["prompt_tokens"] += request.num_prompt_tokens
            self.counts["external_tokens"] += request.external_tokens
            self.counts["local_tokens"] += request.cached_tokens - request.external_tokens
        asked = request.asked
        if may_stop and ((token == END and not asked.ignore_eos) or token in asked.stop_token_ids):
            request.status = RequestStatus.FINISHED_STOPPED
            self._count_in_flight(request)
        elif request.num_output_tokens >= request.max_tokens or request.num_tokens >= self._max_model_len:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        else:
            return Output(token, cached_tokens=request.cached_tokens)
        reason = FINISH_REASONS[request.status]
        params = self._free(request)
        if params is not None and params.get("do_remote_prefill"):
            # What the decode engine shall report as cached, instead of its own reads.
            params["remote_prefill_cached_tokens"] = request.cached_tokens
        return Output(token, reason, params, request.cached_tokens)

    def _count_in_flight(self, request: EngineRequest) -> None:
        """Counts the step that vLLM has planned already when it learns that a turn ended (``AsyncScheduler``).

        It plans none when the turn ends with its last token anyway. When it plans it, it does not know that token: the
        block that the token completes does not get into the prefix cache (``KVCacheManager.allocate_slots``).
        """
        more = request.num_output_tokens < request.max_tokens and request.num_tokens < self._max_model_len
        if self._options.async_scheduling and more and self._manager.allocate(request, request.num_tokens, cache=False):
            request.num_computed_tokens += 1
            request.num_in_flight_tokens = 1
            self._in_flight.append(request)

    def _finish(self, req_ids: Collection[str] | Iterable[str], status: RequestStatus) -> None:
        """Ends requests from outside; one whose read goes on keeps its blocks until then (``finish_requests``)."""
        for req_id in req_ids:
            request = self.requests.get(req_id)
            if request is None or RequestStatus.is_finished(request.status):
                continue
            reads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and req_id not in self._loaded
            self._loaded.discard(req_id)
            for queue in (self.running, self.waiting, self.loading):
                if request in queue:
                    queue.remove(request)
            request.status = status
            self._free(request, delay=reads)

    def _free(self, request: EngineRequest, *, delay: bool = False) -> dict[str, object] | None:
        self._instruments.has_blocks(request.request_id)
        size = self._pool.block_size
        computed = request.block_ids[: -(-request.num_computed_tokens // size)]
        keeps, params = self._connector.request_finished_all_groups(request, (computed,))
        self._finished_req_ids.add(request.request_id)
        self.finished[FINISH_REASONS.get(request.status, "abort")] += 1
        if keeps:
            self._instruments.retained(request.request_id, self._kind_retained(request), request.block_ids)
        elif not delay:
            self._free_blocks(request)
        return params

    def _kind_retained(self, request: EngineRequest) -> Kind:
        params = request.kv_transfer_params
        return "handoff" if params and params.get("do_remote_decode") else "claimed"

    def _free_blocks(self, request: EngineRequest) -> None:
        assert RequestStatus.is_finished(request.status), f"{request.request_id} was freed while it runs"
        self._instruments.released(request.request_id)
        self._manager.free(request)
        del self.requests[request.request_id]

    def _failed_loads(self, output: KVConnectorOutput) -> set[str]:
        failed = set()
        for req_id in output.failed_recving:
            request = self.requests.get(req_id)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                failed.add(req_id)
        for request in self.loading if output.invalid_block_ids else ():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and not output.invalid_block_ids.isdisjoint(
                request.block_ids
            ):
                failed.add(request.request_id)
        return failed

    def _transfers_ended(self, output: KVConnectorOutput) -> None:
        self._connector.update_connector_output(output)
        self._news = bool(output.finished_recving or output.finished_sending)
        for req_id in output.finished_recving or ():
            request = self.requests[req_id]
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._loaded.add(req_id)
            else:
                assert RequestStatus.is_finished(request.status)
                self._instruments.read_unused(req_id)
                self._free_blocks(request)
        for req_id in output.finished_sending or ():
            self._free_blocks(self.requests[req_id])
