"""A stack whose decode nodes retain nothing for long, and turns over its engines, leg by leg."""

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import httpx2

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_local.stack import Node, Stack

BLOCK = 32
SCOPE = "scope"
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
DIGEST = "simulated:weights"
VOCABULARY = range(300, 1000)
"""Token ids that the simulated and the tiny model have."""
RETAIN_NOTHING = ("--retained-share", "0.0001")


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Waits until something is true, and returns it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
    return found


class Chances:
    """One decode node of a stack, and the prefill node that reads from it."""

    def __init__(self, stack: Stack, decode: str) -> None:
        self.node: Node = stack.node(decode)
        self.prefill: Node = stack.node("prefill-1")
        self.connector = self.node.engine.connector
        self._model = stack.model_name
        self._random = random.Random(decode)
        self.http = httpx2.Client(timeout=60, trust_env=False)
        addresses = (self.node.agent_address, stack.registries[0], self.prefill.agent_address)
        self._channels = [grpc.insecure_channel(address) for address in addresses]
        self.agent = agent_pb2_grpc.BlockSetServiceStub(self._channels[0])
        self._prefill_agent = agent_pb2_grpc.BlockSetServiceStub(self._channels[2])
        self._index = registry_pb2_grpc.IndexServiceStub(self._channels[1])
        self._nodes = registry_pb2_grpc.NodeServiceStub(self._channels[1])
        self.engine_id = ""

    def close(self) -> None:
        self.http.close()
        for channel in self._channels:
            channel.close()

    def await_offer(self) -> None:
        """Waits until the directory says that second chances can be had."""
        self.engine_id = eventually(self._offered, 60)

    def _offered(self) -> str:
        nodes = self._nodes.ListNodes(registry_pb2.ListNodesRequest(), timeout=10).nodes
        engines = [engine for node in nodes if node.node_id == self.node.name for engine in node.engines]
        return next((engine.engine_id for engine in engines if engine.second_chance), "")

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=count)

    def complete(self, node: Node, prompt: Sequence[int], count: int, params: Any = None, **more: Any) -> Any:
        """Runs one leg; returns its body."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": count, "temperature": 0, **more}
        body |= {"ignore_eos": True, "return_token_ids": True}
        if params is not None:
            body["kv_transfer_params"] = params
        answer = self.http.post(f"{node.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def turn(self, prompt: Sequence[int], key: str, *, count: int = 2 * BLOCK, salt: str = "pepper") -> list[int]:
        """Runs a cold turn as routers do; returns its history."""
        first = self.complete(self.prefill, prompt, 1, COLD, cache_salt=salt)
        params, more = first["kv_transfer_params"], {"cache_salt": salt}
        if self.connector:
            params = {**params, "backhaul": {"scope": SCOPE, "keys": [key]}}
        else:
            params.pop("backhaul", None)
            more["session_id"] = f"backhaul:{SCOPE}:{key}"
        second = self.complete(self.node, prompt, count, params, **more)
        return [*prompt, *second["choices"][0]["token_ids"]]

    def pointer(self, key: str) -> registry_pb2.BlockSetPointer | None:
        """Returns the pointer under a key, if it is one to what is merely cached."""
        request = registry_pb2.FindBlockSetsRequest(scope=SCOPE, keys=[key])
        found = self._index.FindBlockSets(request, timeout=10).pointers
        return next((pointer for pointer in found if pointer.cached), None)

    def await_pointer(self, key: str) -> registry_pb2.BlockSetPointer:
        found: registry_pb2.BlockSetPointer = eventually(lambda: self.pointer(key))
        return found

    def harvest(
        self, tokens: Sequence[int], set_id: str = "", *, salt: str = "pepper", timeout_s: float = 5.0
    ) -> agent_pb2.HarvestBlockSetResponse:
        return self.agent.HarvestBlockSet(
            agent_pb2.HarvestBlockSetRequest(
                set_id=set_id,
                engine_id=self.engine_id,
                scope=SCOPE,
                weights_digest=DIGEST,
                model=self._model,
                cache_salt=salt,
                token_ids=tokens,
            ),
            timeout=timeout_s,
        )

    def refused(self, tokens: Sequence[int], set_id: str = "", **more: Any) -> str:
        """Returns why there is no handle."""
        try:
            self.harvest(tokens, set_id, **more)
        except grpc.RpcError as error:
            return str(error.details()) + " " + str(error.code())
        raise AssertionError("there is a handle")

    def warm(self, prompt: Sequence[int], harvested: agent_pb2.HarvestBlockSetResponse, count: int) -> Any:
        """Has the prefill engine, whose own cache is empty, answer by itself with a handle; returns its body."""
        self.forget_prefill()
        params = json.loads(harvested.kv_transfer_params_json)
        body = self.complete(self.prefill, prompt, count, params, cache_salt="pepper")
        # No decode engine will ask for it.
        handed = body["kv_transfer_params"]
        _give_back(self._prefill_agent, handed["remote_engine_id"], handed["remote_request_id"])
        return body

    def cold(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns what the decode engine answers with no cache in play."""
        salt = self._random.randbytes(8).hex()
        tokens: list[int] = self.complete(self.node, prompt, count, cache_salt=salt)["choices"][0]["token_ids"]
        return tokens

    def usage(self) -> float:
        """Returns the share of the decode engine's blocks that are in use or retained."""
        lines = self.http.get(f"{self.node.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))

    def forget(self) -> None:
        """Empties the decode engine's prefix cache; its events say so with its next step only."""
        self._empty(self.node)

    def forget_prefill(self) -> None:
        """Empties the prefill engine's prefix cache, which would else be read in place of a handle."""
        self._empty(self.prefill)

    def give_back(self, harvested: agent_pb2.HarvestBlockSetResponse) -> None:
        """Gives a handle back."""
        _give_back(self.agent, self.engine_id, harvested.hand_off_id)

    def _empty(self, node: Node) -> None:
        eventually(lambda: self.http.post(f"{node.url}/reset_prefix_cache").json().get("success", True))


def _give_back(agent: agent_pb2_grpc.BlockSetServiceStub, engine_id: str, hand_off_id: str) -> None:
    agent.ReleaseHandOff(agent_pb2.ReleaseHandOffRequest(engine_id=engine_id, hand_off_id=hand_off_id), timeout=10)
