"""The model's part of a step: reads the KV content in the blocks, computes what is scheduled, writes it there."""

from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.model import KV_BYTES, Model
from backhaul_simulator.pool import BlockPool


class Runner:
    """Runs requests on the memory of one pool."""

    def __init__(self, model: Model, pool: BlockPool) -> None:
        self._model = model
        self._pool = pool

    def run(self, request: EngineRequest, first: int, count: int) -> int | None:
        """Computes ``count`` tokens from position ``first`` on; returns the next token, None inside a prompt.

        Everything before ``first`` is taken from memory as it is found there.
        """
        state = self._model.start()
        size = self._pool.block_size
        block_bytes = self._pool.block_bytes
        blocks = request.block_ids
        full, rest = divmod(first, size)
        with memoryview(self._pool.memory) as memory:
            for block_id in blocks[:full]:
                start = block_id * block_bytes
                state.absorb(memory[start : start + block_bytes])
            if rest:
                start = blocks[full] * block_bytes
                state.absorb(memory[start : start + rest * KV_BYTES])
        end = first + count
        position = first
        while position < end:
            index, offset = divmod(position, size)
            upto = min(end, position - offset + size)
            content = b"".join(map(state.append, request.all_token_ids[position:upto]))
            self._pool.write(blocks[index], content, offset)
            position = upto
        if end < request.num_tokens:
            return None
        return state.next(may_end=request.may_stop)
