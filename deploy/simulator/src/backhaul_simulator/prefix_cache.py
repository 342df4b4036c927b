"""What a request finds in the prefix cache, and what it leaves there (``v1/core/kv_cache_manager.py``)."""

from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.kv_events import FULL_ATTENTION, MEDIUM_GPU, BlockStored, name_of
from backhaul_simulator.pool import BlockPool


class BlockManager:
    """Gives blocks to requests: cached ones first, then free ones."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.block_size

    def find(self, request: EngineRequest) -> list[int]:
        """Returns the cached blocks that hold the start of the request, at most all but its last token.

        The last token is always computed: the next one comes from it (``get_computed_blocks``).
        """
        most = (request.num_tokens - 1) // self._size
        found: list[int] = []
        for block_hash in request.block_hashes(most)[:most]:
            block_id = self._pool.cached(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def allocate(
        self,
        request: EngineRequest,
        token_count: int,
        *,
        cached: list[int] | None = None,
        fit_tokens: int = 0,
        reserved: int = 0,
        cache: bool = True,
    ) -> bool:
        """Gives a request blocks for its first ``token_count`` tokens; False (and nothing happens) when they lack.

        ``cached`` are blocks that `find` found. ``fit_tokens`` must fit too, though they get no blocks yet
        (``scheduler_reserve_full_isl``); ``reserved`` blocks are left free. With ``cache``, full blocks become known to
        the prefix cache at once, before they are computed: those that come later in the same step may use them.
        """
        cached = cached or []
        held = len(request.block_ids) + len(cached)
        revived = sum(map(self._pool.is_free, cached))
        fit = max(0, -(-fit_tokens // self._size) - held) + revived
        need = max(0, -(-token_count // self._size) - held)
        if fit > self._pool.free_count or need + revived > self._pool.free_count - reserved:
            return False
        if cached:
            self._pool.touch(cached)
            request.block_ids.extend(cached)
        if need:
            request.block_ids.extend(self._pool.take(need))
        if cache:
            self.cache(request, min(token_count, request.num_tokens))
        return True

    def cache(self, request: EngineRequest, token_count: int) -> None:
        """Makes the request's full blocks up to ``token_count`` known to the prefix cache."""
        full = token_count // self._size
        hashes = self._pool.hashes
        for index in range(full - 1, -1, -1):
            if hashes[request.block_ids[index]] is not None:
                first = index + 1
                break
        else:
            first = 0
        if first < full:
            known = request.block_hashes(full)
            for index in range(first, full):
                self._pool.cache(request.block_ids[index], known[index])
            self._tell(request, known, first, full)

    def _tell(self, request: EngineRequest, known: list[bytes], first: int, full: int) -> None:
        """Says which blocks were stored (``cache_full_blocks``)."""
        if self._pool.events is None:
            return
        salted = (request.cache_salt,) if request.cache_salt else None
        self._pool.events.append(
            BlockStored(
                block_hashes=[name_of(block_hash) for block_hash in known[first:full]],
                parent_block_hash=name_of(known[first - 1]) if first else None,
                token_ids=request.all_token_ids[first * self._size : full * self._size],
                block_size=self._size,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None,
                extra_keys=[salted if index == 0 else None for index in range(first, full)],
                group_idx=0,
                kv_cache_spec_kind=FULL_ATTENTION,
                session_id=request.asked.session_id,
            )
        )

    def free(self, request: EngineRequest) -> None:
        """Takes all blocks from a request."""
        self._pool.free(request.block_ids)
        request.block_ids = []
