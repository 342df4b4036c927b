"""In-process ports, and a router's turn code on top of them."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from backhaul_common.errors import BackhaulError, DeadlineExceededError
from backhaul_router.attempts import Attempts
from backhaul_router.choosing import Chooser
from backhaul_router.core.body import Endpoint
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import Claim, Grant, Harvest, KeptBlocks
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.engines import EngineError, Failure, Reply
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.lookup import keys_of
from backhaul_router.core.nodes import Node, NodeTable
from backhaul_router.core.routing.assembly import assemble
from backhaul_router.core.routing.planner import RoutePolicy
from backhaul_router.core.routing.settings import RoutingSettings
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from backhaul_router.core.turn import Route
from backhaul_router.departures import Departures
from backhaul_router.legs import Legs
from backhaul_router.lookups import Lookups
from backhaul_router.observing import TurnObserver
from backhaul_router.ports import Answer, Policy, TurnRequest
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.second_chances import SecondChances
from backhaul_router.turns import Turns
from tests.unit.router.bodies import chat
from tests.unit.router.test_nodes import node

BUDGET_S = 0.05
HARVEST_BUDGET_S = 0.25
PATIENCE_S = 30.0
CLUSTER_KEY = b"k" * 32


class FakeClock:
    """Time that moves only when somebody sleeps, or is made to wait."""

    def __init__(self) -> None:
        self.now = 100.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()
        await asyncio.sleep(0)

    def pass_up_to(self, seconds: float, timeout_s: float) -> None:
        """Lets time pass. Raises DeadlineExceededError when it takes longer than ``timeout_s``."""
        self.now += min(seconds, timeout_s)
        if seconds > timeout_s:
            raise DeadlineExceededError("TIMED_OUT", "no answer in time")


class FakeRegistry:
    """Pointers, or an error, after a while."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.takes_s = 0.0
        self.pointers: list[Pointer] = []
        self.failure: BackhaulError | None = None
        self.lookups: list[tuple[str, tuple[str, ...]]] = []

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        self.lookups.append((scope, tuple(keys)))
        self.clock.pass_up_to(self.takes_s, timeout_s)
        if self.failure:
            raise self.failure
        return [pointer for key in keys for pointer in self.pointers if pointer.key == key]


class FakeOwner:
    """Grants everything, or answers with an error, after a while."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.takes_s = 0.0
        self.claims: list[Claim] = []
        self.returned: list[str] = []
        self.released: list[KeptBlocks] = []
        self.on_release: Callable[[], None] = lambda: None
        self.failure: BackhaulError | None = None
        self.handle = '{"remote_block_ids":[[1]],"backhaul":{"token_count":128}}'
        self.harvests: list[Harvest] = []
        self.harvest_takes_s = 0.0
        self.harvest_failures: list[BackhaulError] = []
        """Answers to the next requests for a fresh handle."""
        self.harvested_tokens = 256

    async def claim(self, claim: Claim, *, timeout_s: float) -> Grant:
        self.claims.append(claim)
        self.clock.pass_up_to(self.takes_s, timeout_s)
        if self.failure:
            raise self.failure
        return Grant(claim, self.handle, 128)

    async def harvest(self, harvest: Harvest, *, timeout_s: float) -> Grant:
        self.harvests.append(harvest)
        self.clock.pass_up_to(self.harvest_takes_s, timeout_s)
        if self.harvest_failures:
            raise self.harvest_failures.pop(0)
        return Grant(KeptBlocks(harvest.address, harvest.engine_id, "fresh"), self.handle, self.harvested_tokens)

    def give_back(self, source: Claim | KeptBlocks) -> None:
        if isinstance(source, KeptBlocks):
            self.release(source)
        else:
            self.returned.append(source.request_id)

    def release(self, kept: KeptBlocks) -> None:
        self.released.append(kept)
        self.on_release()


@dataclass
class Sent:
    """One leg."""

    node: str
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    warm: bool = False
    again: bool = False


class FakeStream:
    """A decode engine's answer."""

    def __init__(
        self,
        *chunks: bytes,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        breaks: Failure | None = None,
    ) -> None:
        self.status = status
        self.headers = headers if headers is not None else {"content-type": "text/event-stream"}
        self.complete = False
        self._chunks = chunks or (b"data: [DONE]\n\n",)
        self._breaks = breaks

    async def chunks(self) -> AsyncGenerator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self._breaks:
            raise EngineError(self._breaks)
        self.complete = True

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])


def hand_off(**verdict: Any) -> Reply:
    """A prefill engine's answer with a verdict."""
    full = {"prompt": 200, "local": 0, "read": 0, "spent": False, "refused": "", **verdict}
    names = {"remote_engine_id": "pe", "remote_request_id": "ho", "remote_host": "h"}
    params = {**names, "remote_block_ids": [[5]], "backhaul": full}
    return Reply(200, {}, json.dumps({"kv_transfer_params": params, "usage": {"prompt_tokens": 200}}).encode())


def warm_hand_off(**verdict: Any) -> Reply:
    """A prefill engine's answer after a read."""
    return hand_off(**{"local": 16, "read": 112, "verified": 128, "spent": True, **verdict})


def fault(status: int, message: str = "no") -> Reply:
    """An engine's error."""
    return Reply(status, {}, json.dumps({"error": {"message": message, "type": "t", "code": status}}).encode())


PrefillStep = Reply | Failure | Callable[[], Awaitable[Reply]]
DecodeStep = FakeStream | Failure | Callable[[], Awaitable[FakeStream]]


class FakeEngines:
    """Scripted engines: one step per leg, success when the script is over."""

    def __init__(self) -> None:
        self.prefills: list[Sent] = []
        self.decodes: list[Sent] = []
        self.prefill_steps: list[PrefillStep] = []
        self.decode_steps: list[DecodeStep] = []
        self.tokens: list[int] | Failure = Failure.TIMEOUT
        self.open_decodes = 0
        self.tokenized: list[str] = []
        """Nodes that were asked for a prompt's tokens."""
        self.connected = asyncio.Event()
        """While it is not set prefill engines cannot be reached."""
        self.connected.set()

    async def prefill(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        warm: bool,
        again: bool,
        on_sent: Callable[[], None],
        late: Callable[[Reply], None],
    ) -> Reply:
        self.late = late
        self.prefills.append(Sent(*_address_of(url), json.loads(body), headers, warm, again))
        await self.connected.wait()
        step = self.prefill_steps.pop(0) if self.prefill_steps else warm_hand_off() if warm else hand_off()
        if step is not Failure.REFUSED:
            on_sent()
        if isinstance(step, Failure):
            raise EngineError(step)
        return step if isinstance(step, Reply) else await step()

    @asynccontextmanager
    async def decode(
        self, url: str, body: bytes, headers: Mapping[str, str], *, again: bool, on_sent: Callable[[], None]
    ) -> AsyncIterator[FakeStream]:
        self.decodes.append(Sent(*_address_of(url), json.loads(body), headers, again=again))
        step = self.decode_steps.pop(0) if self.decode_steps else FakeStream()
        if step is not Failure.REFUSED:
            on_sent()
        if isinstance(step, Failure):
            raise EngineError(step)
        stream = step if isinstance(step, FakeStream) else await step()
        self.open_decodes += 1
        try:
            yield stream
        finally:
            self.open_decodes -= 1

    async def tokenize(self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> list[int]:
        self.tokenized.append(_address_of(url)[0])
        if isinstance(self.tokens, Failure):
            raise EngineError(self.tokens)
        return self.tokens


def _address_of(url: str) -> tuple[str, str]:
    node, _, path = url.removeprefix("http://").partition("/")
    return node, f"/{path}"


def ready(*ids: str, **fields: Any) -> list[Node]:
    """Ready nodes whose engine URL is their id."""
    return [
        node(node_id, engine_url=f"http://{node_id}", agent_address=f"agent-{node_id}", **fields) for node_id in ids
    ]


class Bench:
    """The turn code over fakes. Nodes p1, p2, d1, d2 serve the model ``m``.

    Turns are warm where they can be, unless ``prefer`` says otherwise.
    """

    def __init__(
        self,
        *,
        nodes: Iterable[Node] | None = None,
        policy: Policy | None = None,
        tenants: Tenants | None = None,
        harvest_budget_s: float = HARVEST_BUDGET_S,
        prefer: Route | None = Route.WARM,
        routes: Collection[Route] = tuple(Route),
        settings: RoutingSettings | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.registry = FakeRegistry(self.clock)
        self.owner = FakeOwner(self.clock)
        self.engines = FakeEngines()
        self.journal = Journal(100, self.clock.monotonic)
        self.table = NodeTable()
        self.table.replace(ready("p1", "p2", "d1", "d2") if nodes is None else nodes)
        self.fresh = FreshKeys(self.clock.monotonic)
        self.departures = Departures(self.table, self.clock, patience_s=PATIENCE_S)
        policy, observer = policy or Policy(), TurnObserver(self.clock, serves=self.table.serves)
        self.routing = assemble(
            table=self.table,
            monotonic=self.clock.monotonic,
            rng=random.Random(7),
            settings=settings or RoutingSettings(),
            policy=RoutePolicy(
                routes=frozenset(routes), prefer=prefer, decode_computes=policy.prefill_fallback == "decode"
            ),
            on_eject=observer.ejected,
        )
        self.live = self.routing.live
        tokens = PromptTokens(self.engines, self.clock)
        second_chances = SecondChances(
            owner=self.owner,
            tokens=tokens,
            table=self.table,
            planner=self.routing.planner,
            clock=self.clock,
            budget_s=harvest_budget_s,
            keep_constraints=policy.keep_constraints,
        )
        lookups = Lookups(
            registry=self.registry,
            owner=self.owner,
            tokens=tokens,
            table=self.table,
            fresh=self.fresh,
            clock=self.clock,
            budget_s=BUDGET_S,
        )
        legs = Legs(
            engines=self.engines,
            owner=self.owner,
            live=self.live,
            learning=self.routing.learning,
            departures=self.departures,
            policy=policy,
            observer=observer,
        )
        attempts = Attempts(
            legs=legs,
            table=self.table,
            planner=self.routing.planner,
            live=self.live,
            retries=self.routing.retries,
            policy=policy,
            observer=observer,
        )
        self.turns = Turns(
            chooser=Chooser(
                lookups=lookups,
                second_chances=second_chances,
                planner=self.routing.planner,
                rates=self.routing.rates,
            ),
            attempts=attempts,
            legs=legs,
            table=self.table,
            live=self.live,
            fresh=self.fresh,
            tenants=tenants or Tenants(),
            scopes=Scopes(tenants or Tenants(), CLUSTER_KEY),
            policy=policy,
            observer=observer,
            journal=self.journal,
        )

    def publish(self, *contents: str, node_id: str = "d1", set_id: str = "set", **fields: Any) -> None:
        """Publishes what a chat turn with these contents left."""
        key = keys_of(chat(*contents, model="m"), None).own
        defaults: dict[str, Any] = {"token_count": 128, "digest": b"", "stride": 64, "identity": b"i" * 16}
        self.registry.pointers.append(
            Pointer(key, set_id, fields.pop("engine_id", f"{node_id}-engine"), node_id, **{**defaults, **fields})
        )

    async def chat(self, *contents: str, **fields: Any) -> "Done":
        """Runs a streamed chat turn to its end."""
        return await self.run(chat_request(*contents, **fields))

    async def leave(self, *contents: str) -> None:
        """Begins a turn and leaves as a client does whose connection is lost."""
        async with self.turns.run(chat_request(*contents)):
            raise ConnectionResetError

    async def run(self, request: TurnRequest) -> "Done":
        """Runs a turn of whoever its authorization names to its end."""
        request = replace(request, tenant=self.turns.authenticate(request.authorization))
        async with self.turns.run(request) as answer:
            try:
                body = answer.body if answer.stream is None else await answer.stream.read()
                return Done(answer, body or b"", None)
            except EngineError as error:
                return Done(answer, b"", error)


@dataclass
class Done:
    """A turn that ended."""

    answer: Answer
    body: bytes
    broken: EngineError | None

    @property
    def served(self) -> tuple[str, str]:
        """Route and miss reason."""
        return self.answer.outcome.route.value, self.answer.outcome.miss


def chat_request(*contents: str, **fields: Any) -> TurnRequest:
    """Returns a streamed chat request of model ``m``; request options by their names."""
    options = {name: fields.pop(name) for name in ("session_id", "authorization", "reuse") if name in fields}
    body = chat(*contents, **{"model": "m", "stream": True, **fields})
    return TurnRequest(Endpoint.CHAT, msgspec.json.encode(body.fields), tenant="", **options)
