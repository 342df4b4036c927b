"""What a prefill engine does with a handle: prove it, trim it or drop it. Pure: no vLLM, no I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from backhaul_connector.anchors import MIN_STRIDE, Anchors, Verification
from backhaul_connector.wire import PARAMS_KEY, HandleProof

Extras = Sequence[tuple[int, bytes]]

_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class _Handle(msgspec.Struct, frozen=True):
    """What vLLM reads of a handle (``nixl/metadata.py``, ``add_new_req_to_recv``).

    vLLM checks no type: a wrong one ends the engine, and a deadline that is no number never passes.
    """

    remote_block_ids: Annotated[list[list[_BlockId]], msgspec.Meta(min_length=1)]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    remote_num_tokens: _Count
    remote_blocks_expiry_time: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
    tp_size: _Count = 1
    dcp_size: _Count = 1
    pp_size: _Count = 1


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
    return {**params, "do_remote_prefill": False, "remote_block_ids": None}


class Proof:
    """A handle while it is compared with a prompt, bit by bit."""

    def __init__(self, params: Mapping[str, Any], prompt: Prompt, layout: Layout, min_verified: int) -> None:
        self._params = params
        self._layout = layout
        self._min_verified = min_verified
        proof, handle = proof_of(params), _handle_of(params)
        anchors = _anchors(proof) if proof is not None else None
        if handle is None or anchors is None:
            self._refusal = _unreadable(params, anchors)
        else:
            self._refusal = _refusal(anchors, prompt)
        self._handle, self._anchors = handle, anchors
        self._verification: Verification | None = None
        if anchors is not None and not self._refusal:
            self._verification = Verification(anchors, prompt.tokens, prompt.extras or ())

    @property
    def done(self) -> bool:
        """Whether it is known how much is proved."""
        return self._verification is None or self._verification.done

    def advance(self, limit: int) -> int:
        """Digests at most ``limit`` further tokens of the prompt; returns how many."""
        return self._verification.advance(limit) if self._verification is not None else 0

    def judgement(self) -> Judgement:
        """Cuts the handle to what was proved, once that is known.

        vLLM compares nothing, and reads the *last* blocks of a handle that is longer than the prompt. Cutting
        ``remote_num_tokens`` to n and every id list to the first ceil(n / block size) ids is right for one
        full-attention group only: sliding-window and state groups hand out only their tail
        (``nixl/base_scheduler.py``, ``get_exchange_clipped_blocks``). Elsewhere it is the exact full length or nothing.
        """
        params, handle, anchors = self._params, self._handle, self._anchors
        if self._verification is None or handle is None or anchors is None:
            return Judgement(without_handle(params), refused=self._refusal)
        verified = self._verification.verified
        if not verified or verified < self._min_verified:
            return Judgement(without_handle(params), verified, "too_short")
        whole = verified == anchors.token_count == handle.remote_num_tokens
        if not whole and not _can_trim(handle, anchors.token_count, self._layout):
            return Judgement(without_handle(params), verified, "layout")
        kept = handle if whole else _trimmed(handle, verified, self._layout.block_size)
        return Judgement({**params, "do_remote_prefill": False, **msgspec.structs.asdict(kept)}, verified)


def judge(params: Mapping[str, Any], prompt: Prompt, layout: Layout, min_verified: int) -> Judgement:
    """Proves a handle against the prompt, all at once, and cuts it to what was proved."""
    proof = Proof(params, prompt, layout, min_verified)
    proof.advance(len(prompt.tokens))
    return proof.judgement()


def _handle_of(params: Mapping[str, Any]) -> _Handle | None:
    try:
        return msgspec.convert(params, _Handle)
    except msgspec.ValidationError:
        return None


def _unreadable(params: Mapping[str, Any], anchors: Anchors | None) -> str:
    if anchors is None:
        return "unproved"
    return "no_deadline" if params.get("remote_blocks_expiry_time") is None else "malformed"


def _refusal(anchors: Anchors, prompt: Prompt) -> str:
    if prompt.extras is None:
        return "unhashed_prompt"
    if prompt.identity is None:
        return "weights_unknown"
    return "" if anchors.identity == prompt.identity else "identity"


def _anchors(proof: HandleProof) -> Anchors | None:
    try:
        digests, identity = bytes.fromhex(proof.anchors), bytes.fromhex(proof.identity)
    except ValueError:
        return None
    # A stride below the least that a chain has would make proving slow, and the engine's loop waits for it.
    if proof.stride < MIN_STRIDE or proof.spacing <= 0 or proof.spacing % proof.stride or proof.token_count <= 0:
        return None
    anchors = Anchors(identity, proof.stride, proof.spacing, proof.token_count, digests)
    return anchors if anchors.complete else None


def _can_trim(handle: _Handle, token_count: int, layout: Layout) -> bool:
    groups = handle.remote_block_ids
    return (
        layout.trims
        and handle.dcp_size == handle.pp_size == 1
        and len(groups) == 1
        # Also tells equal block sizes: no other size gives as many blocks for as many tokens.
        and len(groups[0]) == -(-token_count // layout.block_size)
    )


def _trimmed(handle: _Handle, verified: int, block_size: int) -> _Handle:
    blocks = -(-verified // block_size)
    ids = [group[:blocks] for group in handle.remote_block_ids]
    return msgspec.structs.replace(handle, remote_num_tokens=verified, remote_block_ids=ids)
