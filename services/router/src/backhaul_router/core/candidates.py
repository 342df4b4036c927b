"""Which of several block sets a turn should claim, or ask for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backhaul_connector.anchors import AnchorChain


@dataclass(frozen=True, slots=True)
class Pointer:
    """Who may hold a block set, as the registry says."""

    key: str
    set_id: str
    engine_id: str
    node_id: str
    token_count: int
    digest: bytes
    """Digest of the first ``token_count`` tokens."""
    stride: int
    identity: bytes
    cached: bool = False
    """Whether nothing is retained: the engine merely may still cache the blocks. All but the names may be missing."""
    traceparent: str = ""
    """Names the span of the turn that left the blocks; empty when its trace was not recorded."""


def distinct(pointers: Iterable[Pointer]) -> list[Pointer]:
    """Returns one pointer per block set (a set is published under each of its keys), order kept."""
    found: dict[tuple[str, str], Pointer] = {}
    for pointer in pointers:
        found.setdefault((pointer.engine_id, pointer.set_id), pointer)
    return list(found.values())


def longest_match(pointers: Iterable[Pointer], tokens: Sequence[int]) -> Pointer | None:
    """Returns the pointer to the longest block set whose tokens are a prefix of ``tokens``, None when there is none."""
    return max(_matching(pointers, tokens), key=lambda pointer: pointer.token_count, default=None)


def likeliest_first(pointers: Sequence[Pointer], tokens: Sequence[int]) -> list[Pointer]:
    """Returns all pointers, those whose tokens are a prefix of ``tokens`` first, the longest at the head.

    Behind them come those that do not say what they cover, then those that lead to other prompts.
    """
    matching = {(pointer.engine_id, pointer.set_id) for pointer in _matching(pointers, tokens)}

    def rank(pointer: Pointer) -> tuple[int, int]:
        if (pointer.engine_id, pointer.set_id) in matching:
            return 0, -pointer.token_count
        return 2 if pointer.digest else 1, 0

    return sorted(pointers, key=rank)


def _matching(pointers: Iterable[Pointer], tokens: Sequence[int]) -> list[Pointer]:
    """Returns the pointers to block sets whose tokens are a prefix of ``tokens``, the shortest first."""
    chains: dict[tuple[bytes, int], AnchorChain] = {}
    found: list[Pointer] = []
    for pointer in sorted(pointers, key=lambda pointer: pointer.token_count):
        if not _sound(pointer) or pointer.token_count > len(tokens):
            continue
        chain = chains.setdefault((pointer.identity, pointer.stride), AnchorChain(pointer.identity, pointer.stride))
        try:
            chain.extend(tokens[chain.token_count : pointer.token_count])
        except OverflowError:
            # No model has such a token, so no block set holds it, nor does a longer one.
            break
        if chain.at(pointer.token_count) == pointer.digest:
            found.append(pointer)
    return found


def _sound(pointer: Pointer) -> bool:
    return pointer.token_count > 0 and pointer.stride > 0 and 0 < len(pointer.identity) <= 64
