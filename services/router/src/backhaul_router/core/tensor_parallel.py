"""Which engines of different tensor-parallel sizes can read from one another."""


def reads(reader_tp: int, source_tp: int, kv_head_count: int) -> bool:
    """Tells whether an engine can read from one of another tensor-parallel size.

    The one must be a multiple of the other (vLLM's `kv_connector/utils.py`, ``TransferTopology.tp_ratio``). With fewer
    ranks than its source a reader cannot take heads that the source holds more than once, for it has more ranks than
    the model has KV heads (`nixl/base_worker.py`, ``_validate_remote_agent_handshake``). 0 is unknown, and fits.
    """
    less, more = sorted((reader_tp, source_tp))
    if not less or less == more:
        return True
    repeated = 0 < kv_head_count < source_tp
    return more % less == 0 and not (reader_tp < source_tp and repeated)
