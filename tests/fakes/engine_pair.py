"""A prefill and a decode engine, real or simulated, each with a recording agent beside it; driven leg by leg."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from backhaul_connector.anchors import AnchorChain, Anchors, identity_of
from backhaul_connector.wire import PARAMS_KEY, BlockSetReport, Freed, Hello, Identity, Retained
from backhaul_local.engines import MODEL_NAME
from backhaul_local.ports import HOST
from backhaul_local.processes import Process
from backhaul_local.stack import Node, Stack
from tests.fakes.agent_peer import AgentPeer
from tests.fakes.nixl_peer import Handshake, NixlApi, NixlPeer, shake_hands

COLD: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SCOPE = "scope"


@dataclass(frozen=True, slots=True)
class Leg:
    """What an engine answered."""

    status: int
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params

    @property
    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = self.params[PARAMS_KEY]
        return verdict

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        return tokens


class Engine:
    """One engine under test."""

    def __init__(
        self,
        url: str,
        process: Process,
        *,
        side_channel_port: int,
        kv_events_port: int,
        nixl: NixlApi,
        ttl_s: float,
        lease_s: float,
        timeout_s: float,
    ) -> None:
        """``timeout_s`` is how long an answer may take before it counts as none."""
        self.url = url
        self.process = process
        self.ttl_s = ttl_s
        self.lease_s = lease_s
        self.agent: AgentPeer
        """Absent where the engine runs without Backhaul's connector."""
        self.kv_events_port = kv_events_port
        self.http = httpx2.Client(base_url=url, timeout=timeout_s, trust_env=False)
        self._side_channel_port = side_channel_port
        self._nixl_api = nixl
        self._nixl: NixlPeer | None = None
        self._hand_offs: list[str] = []

    @classmethod
    def of_stack(cls, stack: Stack, node: Node, nixl: NixlApi, *, ttl_s: float, lease_s: float) -> Self:
        """Returns the engine of a running stack's node, which its own agent looks after."""
        return cls(
            node.url,
            stack.process(node.name),
            side_channel_port=int(node.side_channel.rsplit(":", 1)[1]),
            kv_events_port=0,
            nixl=nixl,
            ttl_s=ttl_s,
            lease_s=lease_s,
            timeout_s=120,
        )

    def close(self) -> None:
        """Closes what leads to the engine."""
        self.http.close()
        if self._nixl is not None:
            self._nixl.close()

    @property
    def nixl(self) -> NixlPeer:
        """A NIXL agent that knows this engine."""
        if self._nixl is None:
            self._nixl = NixlPeer(self._nixl_api, HOST, self._side_channel_port)
        return self._nixl

    def shake_hands(self) -> Handshake:
        """Asks the side channel."""
        return shake_hands(HOST, self._side_channel_port)

    def clock(self) -> float:
        """Returns the engine's `perf_counter`; its epoch is the engine's own."""
        return self.shake_hands().clock

    def complete(self, prompt: Sequence[int], params: Mapping[str, Any] | None, max_tokens: int, **more: Any) -> Leg:
        """Completes token ids, greedily and to the full length."""
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        answer = self.http.post("/v1/completions", json=body)
        leg = Leg(answer.status_code, answer.json())
        if handed := leg.body.get("kv_transfer_params"):
            self.note_hand_off(handed["remote_request_id"])
        return leg

    def note_hand_off(self, request_id: str) -> None:
        """Takes the name of a hand-off that the engine has answered."""
        self._hand_offs.append(request_id)

    def take_hand_offs(self) -> list[str]:
        """Returns, once, the names of the hand-offs that the engine answered, read or not."""
        hand_offs, self._hand_offs = self._hand_offs, []
        return hand_offs

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels; ``name`` may hold a label (``source="..."``)."""
        family, _, label = name.partition("{")
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(family + "{") and label in line)

    def retained(self) -> list[str]:
        """Returns the sets that were reported and not yet reported as freed."""
        messages = self.agent.messages
        freed = {set_id for message in messages if isinstance(message, Freed) for set_id in message.set_ids}
        return [m.set.set_id for m in messages if isinstance(m, Retained) and m.set.set_id not in freed]

    def weights_digest(self) -> str:
        """Returns the weights digest that the connector told its agent: at once, or when it was computed."""
        return self.agent.wait(Hello).weights_digest or self.agent.wait(Identity).weights_digest

    def forget(self) -> bool:
        """Empties the engine's prefix cache; false while blocks are pinned."""
        return bool(self.http.post("/reset_prefix_cache").json().get("success", True))

    def eventually_free(self, timeout_s: float = 5) -> None:
        """Waits until no block is in use or retained. Raises AssertionError when some still are in time."""
        deadline = time.monotonic() + timeout_s
        while self.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline, "the engine keeps blocks"
            time.sleep(0.05)


class Pair:
    """The two engines and how a turn runs over them."""

    def __init__(self, prefill: Engine, decode: Engine, vocabulary: Sequence[int], seed: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Returns random token ids that no other call returned."""
        return self._random.choices(self._vocabulary, k=count)

    def turn(
        self, prompt: Sequence[int], handle: Mapping[str, Any] | None = None, *, keys: Sequence[str] = ("key",),
        max_tokens: int = 60, **more: Any,
    ) -> "Turn":  # fmt: skip
        """Runs both legs, cold or with a handle, and waits for the report when the turn has keys."""
        first = self.prefill.complete(prompt, handle or COLD, 1, **more)
        assert first.status == 200, first.body
        seen = len(self.decode.agent.messages)
        second = self.decode.complete(prompt, self.label(first.params, keys), max_tokens, **more)
        assert second.status == 200, second.body
        report = self.decode.agent.wait(Retained, after=seen).set if keys else None
        return Turn([*prompt], first, second, report)

    def label(self, params: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """Makes the params of a decode leg."""
        return {**params, PARAMS_KEY: {"scope": SCOPE, "keys": list(keys)}}

    def alone(self, prompt: Sequence[int], max_tokens: int = 60) -> list[int]:
        """Returns what the decode engine answers by itself, with no cache of either engine in play."""
        leg = self.decode.complete(prompt, None, max_tokens, cache_salt=self._random.randbytes(8).hex())
        return leg.tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that ran over both engines."""

    prompt: list[int]
    first: Leg
    second: Leg
    report: BlockSetReport | None

    @property
    def history(self) -> list[int]:
        """Prompt and reply."""
        return [*self.prompt, *self.second.tokens]

    @property
    def handle(self) -> dict[str, Any]:
        """What an agent would grant."""
        assert self.report is not None
        return handle_of(self.report)


def answer_of_late_read(ask: Callable[[], Leg], holder: Engine) -> Leg:
    """Returns the answer to a leg whose blocks are kept 7 s longer, while their holder is frozen for 8 s.

    The read starts while vLLM still allows it (until 5 s before the deadline) and cannot end before the holder wakes.
    """
    with ThreadPoolExecutor(1) as pool:
        holder.process.freeze()
        try:
            answer = pool.submit(ask)
            time.sleep(8.0)
        finally:
            holder.process.thaw()
        return answer.result(timeout=30)


def handle_of(report: BlockSetReport) -> dict[str, Any]:
    """Makes the params of a warm prefill leg from a report."""
    proof = {
        "scope": report.scope,
        "identity": report.identity.hex(),
        "stride": report.stride,
        "spacing": report.spacing,
        "token_count": report.token_count,
        "anchors": report.anchors.hex(),
    }
    flags = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**report.params, **flags, PARAMS_KEY: proof}


def forged(handle: Mapping[str, Any], prompt: Sequence[int], weights_digest: str) -> dict[str, Any]:
    """Returns the handle with a proof that lies: it says that the blocks hold ``prompt``."""
    proof = handle[PARAMS_KEY]
    identity = identity_of(weights_digest=weights_digest, adapter="", cache_salt="", scope=SCOPE)
    chain = AnchorChain(identity, proof["stride"])
    chain.extend(prompt[: proof["token_count"]])
    return {**handle, PARAMS_KEY: {**proof, "anchors": Anchors.of(chain, identity).digests.hex()}}
