"""Which of several block sets a turn should claim."""

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


def distinct(pointers: Iterable[Pointer]) -> list[Pointer]:
    """Returns one pointer per block set (a set is published under each of its keys), order kept."""
    found: dict[tuple[str, str], Pointer] = {}
    for pointer in pointers:
        found.setdefault((pointer.engine_id, pointer.set_id), pointer)
    return list(found.values())


def longest_match(pointers: Iterable[Pointer], tokens: Sequence[int]) -> Pointer | None:
    """Returns the pointer to the longest block set whose tokens are a prefix of ``tokens``, None when there is none."""
    for pointer in sorted(pointers, key=lambda pointer: pointer.token_count, reverse=True):
        if pointer.token_count <= len(tokens) and _covers(pointer, tokens):
            return pointer
    return None


def _covers(pointer: Pointer, tokens: Sequence[int]) -> bool:
    if pointer.token_count <= 0 or pointer.stride <= 0 or not 0 < len(pointer.identity) <= 64:
        return False
    chain = AnchorChain(pointer.identity, pointer.stride)
    try:
        chain.extend(tokens[: pointer.token_count])
    except OverflowError:
        # No model has such a token, so no block set holds it.
        return False
    return chain.at(pointer.token_count) == pointer.digest
