"""Block sets as a decode engine reports them, and the handles that an agent makes of them."""

from typing import Any

from backhaul_connector.decode import OpenTurn
from backhaul_connector.wire import BlockSetReport, TurnLabel

IDENTITY = b"i" * 16


def report(
    set_id: str = "set-1",
    *,
    tokens: list[int] | None = None,
    block_size: int = 16,
    identity: bytes = IDENTITY,
    **params: Any,
) -> BlockSetReport:
    """Returns what the connector reports of a turn that ended with ``tokens``; ``params`` replace vLLM's own."""
    tokens = list(range(200)) if tokens is None else tokens
    turn = OpenTurn(
        TurnLabel(scope="scope", keys=["key"], traceparent=f"00-{'a' * 32}-{'b' * 16}-01"),
        identity=identity,
        tokens=tokens,
        extras=(),
        block_size=block_size,
        now=18.0,
    )
    assert turn.close(engine_params(set_id, len(tokens), block_size, **params), 500.0, now=20.0)
    turn.advance(len(tokens))
    return turn.report()


def engine_params(set_id: str, token_count: int, block_size: int = 16, **params: Any) -> dict[str, Any]:
    """Returns what vLLM's decode engine answers (``nixl/pull_scheduler.py``, ``request_finished``)."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(100, 100 + -(-token_count // block_size)))],
        "remote_engine_id": "engine-d",
        "remote_request_id": set_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": token_count,
        "remote_blocks_expiry_time": 500.0,
        "transfer_mode": "pull",
        **params,
    }


def handle(made: BlockSetReport, **params: Any) -> dict[str, Any]:
    """Returns the kv_transfer_params of a warm prefill leg; ``params`` replace those of the report."""
    proof = {
        "scope": made.scope,
        "identity": made.identity.hex(),
        "stride": made.stride,
        "spacing": made.spacing,
        "token_count": made.token_count,
        "anchors": made.anchors.hex(),
    }
    return {**made.params, "backhaul": proof, **params}
