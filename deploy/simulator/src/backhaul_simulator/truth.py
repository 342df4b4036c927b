"""The KV content that tokens ought to have, to compare with what was read."""

from collections import OrderedDict

from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.model import Model, State

_MAX_BLOCKS = 16_384


class Truth:
    """Computes the content of prompts by the model alone; remembers whole blocks, for conversations that go on."""

    def __init__(self, model: Model, block_size: int) -> None:
        self._model = model
        self._size = block_size
        self._known: OrderedDict[bytes, tuple[State, bytes]] = OrderedDict()

    def content(self, request: EngineRequest, first: int, end: int) -> bytes:
        """Returns the content of the request's tokens from ``first`` (start of a block) to ``end``."""
        size = self._size
        full = end // size
        hashes = request.block_hashes(full)
        state = self._model.start()
        parts: list[bytes] = []
        for index in range(full):
            known = self._known.get(hashes[index])
            if known is None:
                known = self._extended(state, request.all_token_ids[index * size : (index + 1) * size])
                self._remember(hashes[index], known)
            state = known[0]
            if index * size >= first:
                parts.append(known[1])
        parts.append(self._extended(state, request.all_token_ids[full * size : end])[1])
        return b"".join(parts)

    def _extended(self, state: State, tokens: list[int]) -> tuple[State, bytes]:
        after = state.copy()
        return after, b"".join(map(after.append, tokens))

    def _remember(self, block_hash: bytes, known: tuple[State, bytes]) -> None:
        self._known[block_hash] = known
        if len(self._known) > _MAX_BLOCKS:
            self._known.popitem(last=False)
