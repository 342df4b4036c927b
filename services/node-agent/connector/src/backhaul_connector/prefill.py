"""What a prefill engine does with a handle: prove it, trim it or drop it. Pure: no vLLM, no I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backhaul_connector.anchors import Anchors, verified_count
from backhaul_connector.wire import PARAMS_KEY, HandleProof

Extras = Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as the engine runs it."""

    tokens: Sequence[int]
    extras: Extras | None
    """Position and hash of each multimodal item; None when one has no hash, or the prompt is given as embeddings."""
    identity: bytes | None
    """Key of the anchor chain; None while the weights digest is not known."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What of this engine's layout decides how a handle may be cut."""

    block_size: int
    trims: bool
    """Whether the engine has one full-attention cache group and neither context nor pipeline parallelism."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What becomes of a handle."""

    params: dict[str, Any] = field(default_factory=dict)
    """Parameters for vLLM: those given, with the handle cut to what was proved, or without it."""
    verified: int = 0
    """Tokens proved equal."""
    refused: str = ""
    """Why the handle was dropped; empty when it was kept."""


def proof_of(params: Mapping[str, Any]) -> HandleProof | None:
    """Returns the proof that rides in a handle, or None when there is none that can be read."""
    try:
        return msgspec.convert(params.get(PARAMS_KEY), HandleProof)
    except msgspec.ValidationError:
        return None


def without_handle(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a cold prefill.

    vLLM reads, and notifies the decode engine, only where ``remote_block_ids`` is set (``nixl/pull_scheduler.py``,
    ``update_state_after_alloc``): without it the decode engine keeps its blocks.
    """
    return {**params, "remote_block_ids": None}


def judge(params: Mapping[str, Any], prompt: Prompt, layout: Layout, min_verified: int) -> Judgement:
    """Proves a handle against the prompt and cuts it to what was proved.

    vLLM compares nothing, and reads the *last* blocks of a handle that is longer than the prompt. Cutting
    ``remote_num_tokens`` to n and every id list to the first ceil(n / block size) ids is right for one full-attention
    group only: sliding-window and state groups hand out only their tail (``nixl/base_scheduler.py``,
    ``get_exchange_clipped_blocks``). Elsewhere it is the exact full length or nothing.
    """
    proof = proof_of(params)
    refusal = _refusal(params, proof, prompt)
    if refusal or proof is None:
        return Judgement(without_handle(params), refused=refusal)
    anchors = _anchors(proof)
    if anchors is None or anchors.identity != prompt.identity:
        return Judgement(without_handle(params), refused="unproved" if anchors is None else "identity")
    verified = verified_count(anchors, prompt.tokens, prompt.extras or ())
    if verified < min_verified:
        return Judgement(without_handle(params), verified, "too_short")
    whole = verified == anchors.token_count == params.get("remote_num_tokens")
    if not whole and not _can_trim(params, anchors.token_count, layout):
        return Judgement(without_handle(params), verified, "layout")
    return Judgement(dict(params) if whole else _trimmed(params, verified, layout.block_size), verified)


def _refusal(params: Mapping[str, Any], proof: HandleProof | None, prompt: Prompt) -> str:
    expiry = params.get("remote_blocks_expiry_time")
    if proof is None:
        return "unproved"
    if not isinstance(expiry, (int, float)) or isinstance(expiry, bool):
        return "no_deadline"
    if prompt.extras is None:
        return "unhashed_prompt"
    return "weights_unknown" if prompt.identity is None else ""


def _anchors(proof: HandleProof) -> Anchors | None:
    try:
        digests, identity = bytes.fromhex(proof.anchors), bytes.fromhex(proof.identity)
    except ValueError:
        return None
    if proof.stride <= 0 or proof.spacing <= 0 or proof.spacing % proof.stride or proof.token_count <= 0:
        return None
    anchors = Anchors(identity, proof.stride, proof.spacing, proof.token_count, digests)
    return anchors if anchors.complete else None


def _can_trim(params: Mapping[str, Any], token_count: int, layout: Layout) -> bool:
    groups = params.get("remote_block_ids")
    return (
        layout.trims
        and params.get("dcp_size", 1) == params.get("pp_size", 1) == 1
        and isinstance(groups, (list, tuple))
        and len(groups) == 1
        # Also tells equal block sizes: no other size gives as many blocks for as many tokens.
        and len(groups[0]) == -(-token_count // layout.block_size)
    )


def _trimmed(params: Mapping[str, Any], verified: int, block_size: int) -> dict[str, Any]:
    blocks = -(-verified // block_size)
    ids = [list(group[:blocks]) for group in params["remote_block_ids"]]
    return {**params, "remote_num_tokens": verified, "remote_block_ids": ids}
