"""The model: what KV content tokens have, and what comes next.

The KV content of a token is a digest of the weights, of all KV content before it *as it was found in memory*, and of
the token. The next token is a function of all KV content found. So a stale, foreign or misaligned block changes
everything that is computed from it.
"""

import hashlib
from collections.abc import Collection, Sequence

KV_BYTES = 8
"""Bytes of KV content that a token has."""

END = 2
"""The end-of-turn token."""

FIRST_WORD = 16
"""Smaller ids are special tokens; besides `END` the model answers none of them."""


class State:
    """The KV content that a computation has found or made so far."""

    __slots__ = ("_end_rate", "_hash", "_words")

    def __init__(self, seen: "hashlib.blake2b", *, words: int, end_rate: int) -> None:
        self._hash = seen
        self._words = words
        self._end_rate = end_rate

    def copy(self) -> "State":
        """Returns a state that goes on from here on its own."""
        return State(self._hash.copy(), words=self._words, end_rate=self._end_rate)

    def append(self, token: int) -> bytes:
        """Computes a token: returns its KV content, and goes on from there."""
        digest = self._hash.copy()
        digest.update(token.to_bytes(4, "little"))
        kv = digest.digest()
        self._hash.update(kv)
        return kv

    def absorb(self, kv: bytes | bytearray | memoryview) -> None:
        """Takes KV content that is in memory already; of one token or of many."""
        self._hash.update(kv)

    def next(self, *, may_end: bool = True) -> int:
        """Returns the token that comes next; never `END` unless it ``may_end``."""
        digest = self._hash.copy()
        digest.update(b"next")
        number = int.from_bytes(digest.digest(), "little")
        if may_end and (number >> 40) % self._end_rate == 0:
            return END
        return FIRST_WORD + number % self._words


class Model:
    """A deterministic model: equal weights and equal tokens give equal answers."""

    def __init__(self, *, weights: str = "weights", vocabulary: int = 50_000, end_rate: int = 64) -> None:
        """About one token in ``end_rate`` is the end of the turn.

        Raises ValueError for a vocabulary without words, or a rate below 1.
        """
        if vocabulary <= FIRST_WORD or end_rate < 1:
            raise ValueError(f"vocabulary must be above {FIRST_WORD} and end_rate at least 1")
        self.vocabulary = vocabulary
        self._end_rate = end_rate
        self._empty = hashlib.blake2b(weights.encode(), digest_size=KV_BYTES)

    def start(self) -> State:
        """Returns the state before the first token."""
        return State(self._empty.copy(), words=self.vocabulary - FIRST_WORD, end_rate=self._end_rate)

    def answer(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> list[int]:
        """Returns what a server with endless memory and no transfer answers, the token that ends it included."""
        state = self.start()
        for token in prompt:
            state.append(token)
        answer: list[int] = []
        while len(answer) < max_tokens:
            may_stop = len(answer) >= min_tokens
            token = state.next(may_end=may_stop)
            answer.append(token)
            if may_stop and ((token == END and not ignore_eos) or token in stop_token_ids):
                break
            state.append(token)
        return answer
