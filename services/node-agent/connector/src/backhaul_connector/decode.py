"""What a decode engine notes about a turn: how the next one will find it, and what proves what it covers."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backhaul_connector.anchors import AnchorChain, Anchors, stride_of
from backhaul_connector.wire import PARAMS_KEY, BlockSetReport, TurnLabel


def label_of(params: Mapping[str, Any] | None) -> TurnLabel | None:
    """Returns the label of a decode turn; None for a turn that is not ours.

    A label that cannot be read counts as one without keys: nothing could find the blocks again.
    """
    if not params or params.get("do_remote_decode") or PARAMS_KEY not in params:
        return None
    try:
        return msgspec.convert(params[PARAMS_KEY], TurnLabel)
    except msgspec.ValidationError:
        return TurnLabel(scope="", keys=[])


def opened(
    label: TurnLabel,
    *,
    identity: bytes | None,
    tokens: Sequence[int],
    extras: Sequence[tuple[int, bytes]] | None,
    block_size: int,
    now: float,
) -> "OpenTurn | None":
    """Opens a turn that comes ``now``; None when its blocks are to be freed at once.

    They could not be found again, or not be proved.
    """
    if not label.keys or identity is None or extras is None:
        return None
    return OpenTurn(label, identity=identity, tokens=tokens, extras=extras, block_size=block_size, now=now)


def settled(params: Mapping[str, Any], in_flight: int, block_size: int) -> dict[str, Any]:
    """Cuts what the engine retains to the tokens whose KV is certainly written.

    ``in_flight`` tokens are those of a step that was scheduled before the turn's end was known: vLLM counts them as
    computed already. Only for an engine whose handles may be cut (one full-attention group).
    """
    if not in_flight:
        return dict(params)
    count = params["remote_num_tokens"] - in_flight
    ids = [list(group[: -(-count // block_size)]) for group in params["remote_block_ids"]]
    return {**params, "remote_num_tokens": count, "remote_block_ids": ids}


class OpenTurn:
    """A labelled turn: its tokens are digested bit by bit, while it runs and after it was closed.

    ``tokens`` are all tokens of the request, prompt and output, and grow with it.
    """

    def __init__(
        self,
        label: TurnLabel,
        *,
        identity: bytes,
        tokens: Sequence[int],
        extras: Sequence[tuple[int, bytes]],
        block_size: int,
        now: float,
    ) -> None:
        self.label = label
        self._opened_at = now
        self._identity = identity
        self._tokens = tokens
        self._chain = AnchorChain(identity, stride_of(block_size), extras)
        self._params: dict[str, Any] = {}
        self._count: int | None = None
        """Tokens that are covered, once the turn is closed."""
        self._ended_at = now
        self.deadline = 0.0
        """Deadline that the engine last confirmed of what it retains."""

    def advance(self, limit: int) -> int:
        """Digests at most ``limit`` further tokens of those that will certainly be covered; returns how many.

        While the turn runs only whole steps of the chain, and never the last token: a turn may end without it.
        """
        start = self._chain.token_count
        if self._count is None:
            end = min(start + limit, len(self._tokens) - 1)
            end -= end % self._chain.stride
        else:
            end = min(start + limit, self._count)
        if end <= start:
            return 0
        self._chain.extend(self._tokens[start:end])
        return end - start

    @property
    def done(self) -> bool:
        """Whether the turn is closed and all that is retained of it is digested."""
        return self._chain.token_count == self._count

    def close(self, params: Mapping[str, Any], deadline: float, *, now: float) -> bool:
        """Notes what the engine retains of a turn that ends ``now``; False when it cannot be proved.

        ``params`` are vLLM's, with ``remote_num_tokens`` tokens covered. Fewer than were digested cannot be proved, nor
        more than there are.
        """
        count = params["remote_num_tokens"]
        if not self._chain.token_count <= count <= len(self._tokens):
            return False
        self._params, self._count, self._ended_at, self.deadline = dict(params), count, now, deadline
        return True

    def report(self) -> BlockSetReport:
        """Makes the report of a turn that is `done`."""
        anchors = Anchors.of(self._chain, self._identity)
        return BlockSetReport(
            set_id=self._params["remote_request_id"],
            scope=self.label.scope,
            keys=self.label.keys,
            params=self._params,
            token_count=anchors.token_count,
            block_count=sum(map(len, self._params["remote_block_ids"])),
            identity=self._identity,
            stride=anchors.stride,
            spacing=anchors.spacing,
            anchors=anchors.digests,
            deadline=self.deadline,
            ended_at=self._ended_at,
            turn_s=self._ended_at - self._opened_at,
            continues=self.label.continues,
            traceparent=self.label.traceparent,
        )
