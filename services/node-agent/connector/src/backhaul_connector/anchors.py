"""Anchors: digests of token prefixes, which prove how much of a prompt a block set covers.

A chain of BLAKE2b-128 digests runs over the token ids in steps of ``stride`` tokens; its key (the *identity*) covers
all that must be equal besides the tokens: weights, adapter, cache salt, scope. A block set carries the digest at every
``spacing`` tokens (a multiple of ``stride``, so that there are at most 256) and at its exact end. Two prefixes with
equal anchors are equal, and belong to the same model, salt and tenant.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_SIZE = 16
"""Bytes of one digest."""

MAX_ANCHORS = 256
"""Anchors at full spacing that a block set carries at most (one more for its exact end)."""

MIN_STRIDE = 64
"""Tokens of the smallest step."""

_TOKEN_BYTES = struct.calcsize("i")
_PIECE = 1024
"""Tokens that are digested between two looks at whether a prompt still agrees."""


def identity_of(*, weights_digest: str, adapter: str, cache_salt: str, scope: str) -> bytes:
    """Returns the key (16 bytes) of the anchor chain for one model, adapter, salt and scope.

    ``adapter`` is empty without LoRA, ``cache_salt`` empty without salt. Each part is length-prefixed, so that no two
    different tuples give the same bytes.
    """
    state = hashlib.blake2b(digest_size=DIGEST_SIZE, person=b"backhaul-ident-1")
    for part in (weights_digest, adapter, cache_salt, scope):
        raw = part.encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(4, "big"))
        state.update(raw)
    return state.digest()


def stride_of(block_size: int) -> int:
    """Returns the chain's step in tokens: the smallest power of two that is at least 64 and the block size."""
    stride = MIN_STRIDE
    while stride < block_size:
        stride *= 2
    return stride


def spacing_of(token_count: int, stride: int) -> int:
    """Returns the distance in tokens of the anchors that a set of ``token_count`` tokens carries."""
    spacing = stride
    while token_count // spacing > MAX_ANCHORS:
        spacing *= 2
    return spacing


class AnchorChain:
    """Digests a growing list of token ids.

    ``extras`` maps a token position to bytes that belong to it (the hash of an image whose placeholder starts there);
    they are mixed in where their position is.
    """

    def __init__(self, identity: bytes, stride: int, extras: Sequence[tuple[int, bytes]] = ()) -> None:
        self._identity = identity
        # A copy of it costs a fraction of what making it again for each step does.
        self._keyed = hashlib.blake2b(digest_size=DIGEST_SIZE, key=identity)
        self._extras = sorted(extras)
        self._tail = b""
        self._digests: list[bytes] = []
        self.stride = stride

    @property
    def token_count(self) -> int:
        """Tokens digested so far."""
        return len(self._digests) * self.stride + len(self._tail) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends token ids.

        Raises OverflowError for an id that does not fit into 32 bits.
        """
        pending = self._tail + _packed(tokens)
        step = self.stride * _TOKEN_BYTES
        whole = len(pending) - len(pending) % step
        for start in range(0, whole, step):
            self._digests.append(self._step(pending[start : start + step]))
        self._tail = pending[whole:]

    def at(self, token_count: int) -> bytes:
        """Returns the digest of the first ``token_count`` tokens: a multiple of the stride, or all digested so far.

        Raises ValueError for any other count.
        """
        if token_count == self.token_count:
            return self._step(self._tail) if self._tail else self._last()
        steps, rest = divmod(token_count, self.stride)
        if rest or not 0 <= steps <= len(self._digests):
            raise ValueError(f"no anchor at {token_count} of {self.token_count} tokens")
        return self._digests[steps - 1] if steps else self._identity

    def every(self, spacing: int, after: int = 0) -> list[bytes]:
        """Returns the digests at each ``spacing`` tokens behind the first ``after``; both multiples of the stride."""
        step = spacing // self.stride
        return self._digests[after // self.stride + step - 1 :: step]

    def _last(self) -> bytes:
        return self._digests[-1] if self._digests else self._identity

    def _step(self, tokens: bytes) -> bytes:
        state = self._keyed.copy()
        state.update(self._last() + tokens)
        if self._extras:
            state.update(self._extras_of(len(tokens) // _TOKEN_BYTES))
        return state.digest()

    def _extras_of(self, token_count: int) -> bytes:
        """Returns what belongs to the tokens of the next step."""
        start = len(self._digests) * self.stride
        first, end = (bisect_left(self._extras, (edge, b"")) for edge in (start, start + token_count))
        # The length keeps one extra from passing for two: some are names that a client chose.
        return b"".join(
            position.to_bytes(8, "big") + len(extra).to_bytes(8, "big") + extra
            for position, extra in self._extras[first:end]
        )


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"{len(tokens)}i", *tokens)
    except struct.error as error:
        raise OverflowError(f"a token id is an integer of 32 bits: {error}") from error


@dataclass(frozen=True, slots=True)
class Anchors:
    """The anchors of one block set."""

    identity: bytes
    stride: int
    spacing: int
    token_count: int
    digests: bytes
    """Digests at every ``spacing`` tokens and, last, at ``token_count``; 16 bytes each, end to end."""

    @property
    def complete(self) -> bool:
        """Whether there is a digest for every point that stride, spacing and token count name."""
        return len(self.digests) == (self.token_count // self.spacing + 1) * DIGEST_SIZE

    @property
    def end(self) -> bytes:
        """Digest of all ``token_count`` tokens."""
        return self.digests[-DIGEST_SIZE:]

    @classmethod
    def of(cls, chain: AnchorChain, identity: bytes) -> "Anchors":
        """Takes the anchors of everything that ``chain`` has digested."""
        count = chain.token_count
        spacing = spacing_of(count, chain.stride)
        return cls(identity, chain.stride, spacing, count, b"".join(chain.every(spacing)) + chain.at(count))


class Verification:
    """Finds out, piece by piece, how many leading tokens of ``tokens`` are equal to those of a block set.

    The caller has compared the identities.
    """

    def __init__(self, anchors: Anchors, tokens: Sequence[int], extras: Sequence[tuple[int, bytes]] = ()) -> None:
        self._anchors = anchors
        self._tokens = tokens
        self._chain = AnchorChain(anchors.identity, anchors.stride, extras)
        self._last = max(0, min(len(tokens), anchors.token_count))
        self.done = not self._last
        self.verified = 0
        """Tokens that are proved equal: at the end all of the block set, or a multiple of ``anchors.spacing``."""

    def advance(self, limit: int) -> int:
        """Digests at most ``limit`` further tokens; returns how many."""
        start = self._chain.token_count
        end = min(start + limit, self._last)
        while not self.done and self._chain.token_count < end:
            before = self._chain.token_count
            self._chain.extend(self._tokens[before : min(before + _PIECE, end)])
            self._compare()
        return self._chain.token_count - start

    def _compare(self) -> None:
        anchors, digested = self._anchors, self._chain.token_count
        place = self.verified // anchors.spacing * DIGEST_SIZE
        for digest in self._chain.every(anchors.spacing, self.verified):
            if digest != anchors.digests[place : place + DIGEST_SIZE]:
                self.done = True
                return
            place += DIGEST_SIZE
            self.verified += anchors.spacing
        if digested == self._last:
            self.done = True
            if digested == anchors.token_count and self._chain.at(digested) == anchors.end:
                self.verified = digested


def verified_count(anchors: Anchors, tokens: Sequence[int], extras: Sequence[tuple[int, bytes]] = ()) -> int:
    """Returns how many leading tokens of ``tokens`` are proved equal to those of the block set; 0 when none are.

    The answer is ``anchors.token_count`` when the block set's tokens are a prefix of ``tokens``, else a multiple of
    ``anchors.spacing``. The caller has compared the identities.
    """
    verification = Verification(anchors, tokens, extras)
    verification.advance(len(tokens))
    return verification.verified
