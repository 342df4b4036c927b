"""A router in virtual time: the real planner with all that it learns from, over virtual engines.

What a router does beside that (`backhaul_router.choosing`, `attempts`, `legs`) is here in short: nothing fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from backhaul_connector.wire import Verdict
from backhaul_router.core.nodes import Engine, Node, NodeState, NodeTable, Role
from backhaul_router.core.routing.assembly import assemble
from backhaul_router.core.routing.demand import Demand, Held, Prefix
from backhaul_router.core.routing.planner import Plan, RoutePolicy
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.routing.settings import RoutingSettings
from backhaul_router.core.routing.target import Target, TargetKey
from backhaul_router.core.turn import Route
from benchmarks.routing.clusters import BLOCK_SIZE, Cluster, Speed
from tests.fakes.virtual_engine import Content, VirtualEngine
from tests.fakes.virtual_time import Process, World

_LOOKUP_S, _CLAIM_S, _REQUEST_S = 0.004, 0.003, 0.002
_MODEL = "m"


@dataclass(slots=True)
class Asked:
    """A turn, and what became of it."""

    content: Content
    beginnings: tuple[tuple[str, int], ...]
    """Name and bytes of each beginning of the prompt, longest first."""
    new_bytes: int
    """What came after the last answer."""
    answer_tokens: int
    plan: Plan | None = None
    ttft_s: float = 0.0

    @property
    def byte_count(self) -> int:
        """Text of the prompt."""
        return self.beginnings[0][1]

    @property
    def way(self) -> str:
        """Its route; ``alone`` for a cold one over the decode engine alone."""
        assert self.plan is not None
        return self.plan.route.value if self.plan.prefill or self.plan.route is Route.APPEND else "alone"


@dataclass(slots=True)
class _Run:
    """A turn on its way."""

    asked: Asked
    demand: Demand
    began_at: float
    plan: Plan = field(init=False)


class VirtualRouter:
    """Serves turns."""

    def __init__(self, world: World, cluster: Cluster, *, prefer: Route | None, settings: RoutingSettings) -> None:
        self._world = world
        self._engines: dict[TargetKey, VirtualEngine] = {}
        self._held: dict[str, tuple[Target, int]] = {}
        """By conversation: its holder, and the tokens that are held."""
        nodes = [
            *self._nodes(Role.PREFILL, cluster.prefill, cluster),
            *self._nodes(Role.DECODE, cluster.decode, cluster),
        ]
        table = NodeTable()
        table.replace(nodes)
        self._routing = assemble(
            table=table,
            monotonic=world.monotonic,
            rng=Random(7),
            settings=settings,
            policy=RoutePolicy(prefer=prefer),
        )
        self._routing.follow([node.node_id for node in nodes])

    def _nodes(self, role: Role, speeds: tuple[Speed, ...], cluster: Cluster) -> list[Node]:
        nodes = []
        for number, speed in enumerate(speeds, start=1):
            name = f"{role.value}-{number}"
            engine = Engine(
                engine_id=f"{name}-engine",
                compatibility_hash="h",
                weights_digest="w",
                connector_version="1",
                reuse=True,
                block_size=BLOCK_SIZE,
                block_count=speed.block_count,
            )
            nodes.append(Node(name, role, name, name, frozenset({_MODEL}), (engine,), NodeState.READY))
            self._engines[name, engine.engine_id] = VirtualEngine(
                self._world, speed, transfer_block_s=cluster.transfer_block_s
            )
        return nodes

    def report(self) -> None:
        """Agents say what their engines have to do."""
        for key, engine in self._engines.items():
            self._routing.live.reports.take(key, EngineReport(engine.running, engine.waiting, 0.0))

    def serve(self, asked: Asked) -> Process:
        """Serves a turn to the end of its answer."""
        began_at = self._world.now
        if asked.content.conversation in self._held:
            yield _LOOKUP_S
        run = _Run(asked, self._demand(asked), began_at)
        plan = self._routing.planner.plan(run.demand).chosen
        assert plan is not None
        run.plan = asked.plan = plan
        for target in filter(None, (plan.prefill, plan.decode)):
            self._routing.live.picked(target)
        if plan.prefill is not None:
            with self._routing.live.load.running(plan.decode):
                yield from self._prefill(run, plan.prefill)
        yield from self._decode(run)
        self._held[asked.content.conversation] = plan.decode, asked.content.token_count + asked.answer_tokens - 1

    def _demand(self, asked: Asked) -> Demand:
        rates, held = self._routing.rates, None
        token_count = rates.estimate(_MODEL, asked.byte_count)
        if found := self._held.get(asked.content.conversation):
            held = Held(*found, proved=True)
            token_count = held.token_count + rates.estimate(_MODEL, asked.new_bytes)
        per_byte = token_count / asked.byte_count
        prefixes = tuple(Prefix(name, round(byte_count * per_byte)) for name, byte_count in asked.beginnings)
        return Demand(_MODEL, token_count, prefixes, held)

    def _prefill(self, run: _Run, target: Target) -> Process:
        content, learning = run.asked.content, self._routing.learning
        remote = 0
        if run.plan.route is Route.WARM:
            yield _CLAIM_S
            remote = run.demand.held_tokens
        with self._routing.live.load.running(target, expected_s=run.plan.estimate.prefill_s) as work:
            yield _REQUEST_S
            request = self._engines[target.key].serve(content, remote_tokens=remote)
            yield request.done
            seconds = work.served()
        verdict = Verdict(prompt=content.token_count, local=request.local_tokens, read=request.read_tokens)
        learning.prefilled(
            target,
            run.demand,
            byte_count=run.asked.byte_count,
            token_count=content.token_count,
            verdict=verdict,
            seconds=seconds,
        )

    def _decode(self, run: _Run) -> Process:
        asked, target, learning = run.asked, run.plan.decode, self._routing.learning
        handed = run.plan.prefill is not None
        expected_s = 0.0 if handed else run.plan.estimate.prefill_s
        with self._routing.live.load.running(target, expected_s=expected_s) as work:
            sent_at = self._world.now
            yield _REQUEST_S
            request = self._engines[target.key].serve(
                asked.content,
                answer_tokens=asked.answer_tokens,
                remote_tokens=asked.content.token_count if handed else 0,
            )
            yield request.first
            seconds = work.served()
            if handed:
                learning.decoded(target, run.demand, seconds=self._world.now - sent_at)
            else:
                learning.appended(target, run.demand, seconds=seconds)
            asked.ttft_s = self._world.now - run.began_at
            yield request.done


ROUTES: Mapping[str, Route | None] = {"auto": None, **{route.value: route for route in Route}}
"""Policies by the names that the router's configuration has for them."""
