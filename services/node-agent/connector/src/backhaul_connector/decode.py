"""What a decode engine notes about a turn: how the next one will find it, and what proves what it covers."""

from array import array
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
    prompt: Sequence[int],
    extras: Sequence[tuple[int, bytes]] | None,
    block_size: int,
    now: float,
) -> "OpenTurn | None":
    """Opens a turn that comes ``now``; None when its blocks are to be freed at once.

    They could not be found again, or not be proved.
    """
    if not label.keys or identity is None or extras is None:
        return None
    return OpenTurn(label, identity=identity, prompt=prompt, extras=extras, block_size=block_size, now=now)


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
    """A labelled turn while it runs. The prompt is digested when it arrives, the output when it ends."""

    def __init__(
        self,
        label: TurnLabel,
        *,
        identity: bytes,
        prompt: Sequence[int],
        extras: Sequence[tuple[int, bytes]],
        block_size: int,
        now: float,
    ) -> None:
        self.label = label
        self._opened_at = now
        self._identity = identity
        self._chain = AnchorChain(identity, stride_of(block_size), extras)
        # The last token is left for `close`: a turn may end with less computed than was asked.
        self._digested = max(0, len(prompt) - 1)
        self._chain.extend(array("i", prompt[: self._digested]))

    def close(
        self, params: Mapping[str, Any], tokens: Sequence[int], deadline: float, *, now: float
    ) -> BlockSetReport | None:
        """Makes the report of what the engine retains of a turn that ends ``now``.

        ``params`` are vLLM's, with ``remote_num_tokens`` tokens covered; ``tokens`` are all tokens of the request. None
        when fewer are covered than were digested: nothing could be proved.
        """
        count = params["remote_num_tokens"]
        if not self._digested <= count <= len(tokens):
            return None
        self._chain.extend(tokens[self._digested : count])
        anchors = Anchors.of(self._chain, self._identity)
        return BlockSetReport(
            set_id=params["remote_request_id"],
            scope=self.label.scope,
            keys=self.label.keys,
            params=dict(params),
            token_count=count,
            block_count=sum(map(len, params["remote_block_ids"])),
            identity=self._identity,
            stride=anchors.stride,
            spacing=anchors.spacing,
            anchors=anchors.digests,
            deadline=deadline,
            ended_at=now,
            turn_s=now - self._opened_at,
            continues=self.label.continues,
            traceparent=self.label.traceparent,
        )
