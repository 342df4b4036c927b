"""A decode node as operators see it: the sets of its agent, its engine's memory, the index in etcd."""

import base64
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import grpc
import httpx2

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.grpc_client import to_error
from backhaul_local.engines import MODEL_NAME
from backhaul_local.stack import Stack
from tests.fakes.engine_pair import Engine

_CALL_S = 10.0


class Owner:
    """The owner of one decode engine's sets, and that engine. Calls may raise grpc.RpcError."""

    def __init__(self, stack: Stack, engine: Engine, *, block_count: int, name: str = "decode-1") -> None:
        self.engine = engine
        self._name = name
        self._etcd = f"http://{stack.etcd_endpoints[0]}/v3/kv/range"
        self._blocks = block_count
        # An agent that was restarted is asked again soon.
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 500)]
        self._agent_channel = grpc.insecure_channel(stack.node(name).agent_address, options=options)
        self._registry_channel = grpc.insecure_channel(stack.registries[0], options=options)
        self.stub = agent_pb2_grpc.BlockSetServiceStub(self._agent_channel)
        self._registry = registry_pb2_grpc.NodeServiceStub(self._registry_channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agent_channel.close()
        self._registry_channel.close()

    def sets(self) -> list[agent_pb2.BlockSet]:
        """Returns the sets of the node, oldest or not."""
        request = agent_pb2.ListBlockSetsRequest()
        return [*self.stub.ListBlockSets(request, timeout=_CALL_S, wait_for_ready=True).block_sets]

    def new_set(self, known: Sequence[agent_pb2.BlockSet] = ()) -> agent_pb2.BlockSet:
        """Waits for the one set that is held besides those known."""
        ids, deadline = {held.set_id for held in known}, time.monotonic() + 30
        while True:
            new = [held for held in self.sets() if held.set_id not in ids]
            if len(new) == 1 and new[0].state == agent_pb2.BLOCK_SET_STATE_HELD:
                return new[0]
            assert time.monotonic() < deadline, f"not one new set but {new}"
            time.sleep(0.1)

    def release(self, *sets: agent_pb2.BlockSet) -> agent_pb2.ReleaseBlockSetsResponse:
        """Releases sets, as an operator."""
        request = agent_pb2.ReleaseBlockSetsRequest(set_ids=[held.set_id for held in sets])
        deadline = time.monotonic() + 30
        while True:
            try:
                return self.stub.ReleaseBlockSets(request, timeout=_CALL_S)
            except grpc.RpcError as error:
                # An agent that has just started is about to load nixl.
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def refusal(self, held: agent_pb2.BlockSet) -> str:
        """Claims a set, and gives it back; returns why it was not granted, empty when it was."""
        request = agent_pb2.ClaimBlockSetRequest(
            request_id=uuid.uuid4().hex,
            set_id=held.set_id,
            engine_id=held.engine_id,
            scope=held.scope,
            weights_digest=self._weights(),
        )
        try:
            self.stub.ClaimBlockSet(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            return to_error(error).reason
        self.stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id=request.request_id), timeout=_CALL_S)
        return ""

    def hears_the_engine(self) -> bool:
        """Tells whether the agent is told what the engine caches: it is not of what was computed before."""
        nodes = [node for node in self._nodes() if node.node_id == self._name]
        return any(engine.second_chance for node in nodes for engine in node.engines)

    def harvest(self, tokens: Sequence[int]) -> str:
        """Has the owner make a fresh handle for tokens that the engine caches; returns its name."""
        deadline = time.monotonic() + 60
        while True:
            nodes = [node for node in self._nodes() if node.node_id == self._name]
            request = agent_pb2.HarvestBlockSetRequest(
                set_id="gone",
                engine_id=nodes[0].engines[0].engine_id,
                scope="scope",
                weights_digest=self._weights(),
                model=MODEL_NAME,
                token_ids=tokens,
            )
            try:
                return self.stub.HarvestBlockSet(request, timeout=_CALL_S).hand_off_id
            except grpc.RpcError:
                # What the engine caches has yet to be told.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def node_names(self) -> list[str]:
        """Returns the names of all nodes in the directory."""
        return [node.node_id for node in self._nodes()]

    def used(self) -> int:
        """Returns how many blocks of the engine are in use or retained."""
        # One block is never used (vllm/v1/core/block_pool.py, the null block).
        return round(self.engine.metric("vllm:kv_cache_usage_perc") * (self._blocks - 1))

    def pointers(self, held: agent_pb2.BlockSet) -> int:
        """Returns how many pointers in etcd lead to a set, or to what is still cached of it, as of now."""
        prefix = b"/default/index/"
        request = {"key": _encoded(prefix), "range_end": _encoded(prefix[:-1] + b"0"), "keys_only": True}
        answer = httpx2.post(self._etcd, json=request, trust_env=False).json()
        ids = [unquote(base64.b64decode(one["key"]).decode().rpartition("/")[2]) for one in answer.get("kvs", [])]
        return sum(set_id in (held.set_id, f"cached-{held.set_id}") for set_id in ids)

    def _weights(self) -> str:
        reader = next(node for node in self._nodes() if node.node_id == "prefill-1")
        return reader.engines[0].weights_digest

    def _nodes(self) -> Sequence[registry_pb2.Node]:
        return self._registry.ListNodes(registry_pb2.ListNodesRequest(), timeout=_CALL_S).nodes


def _encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()
