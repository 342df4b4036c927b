"""Empties engines between conversations: the prefill engine's cache, and what the decode engine retains."""

import time

import grpc
import httpx2

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_local.processes import LocalError

_WITHIN_S = 60.0
_TIMEOUT_S = 5.0
_PAUSE_S = 0.1


def empty_prefix_cache(engine: str) -> None:
    """Empties an engine's prefix cache; waits until it can be. Raises LocalError when it cannot.

    vLLM answers 200 with ``"success": false`` while any block is in use, as those of a hand-off are until it is read.
    """
    give_up_at, said = time.monotonic() + _WITHIN_S, ""
    with httpx2.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        while time.monotonic() < give_up_at:
            try:
                reply = client.post(f"{engine}/reset_prefix_cache")
                said = f"{reply.status_code} {reply.text}"
                if reply.status_code == httpx2.codes.OK and reply.json()["success"]:
                    return
            except httpx2.TransportError as error:
                said = repr(error)
            time.sleep(_PAUSE_S)
    raise LocalError(f"{engine}: the prefix cache could not be emptied: {said}")


def release_block_sets(agent: str) -> None:
    """Has an agent, host:port, release all that its engine retains; waits until it has. Raises LocalError.

    A decode engine that retains something goes on stepping without pause (vLLM's ``v1/engine/core.py``, ``has_work``),
    which would slow down whatever comes next on the same cores.
    """
    give_up_at, said = time.monotonic() + _WITHIN_S, ""
    with grpc.insecure_channel(agent, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = agent_pb2_grpc.BlockSetServiceStub(channel)
        while time.monotonic() < give_up_at:
            try:
                listed = stub.ListBlockSets(agent_pb2.ListBlockSetsRequest(), timeout=_TIMEOUT_S)
                ids = [block_set.set_id for block_set in listed.block_sets]
                if not ids:
                    return
                stub.ReleaseBlockSets(agent_pb2.ReleaseBlockSetsRequest(set_ids=ids), timeout=_TIMEOUT_S)
                said = f"{len(ids)} block sets stay"
            except grpc.RpcError as error:
                said = str(error)
            time.sleep(_PAUSE_S)
    raise LocalError(f"{agent}: what is retained could not be released: {said}")
