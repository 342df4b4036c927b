"""Puts together what answers calls, whichever listener they come by."""

from dataclasses import dataclass

from backhaul_common.clock import Clock
from backhaul_router.admission import Admission
from backhaul_router.attempts import Attempts
from backhaul_router.choosing import Chooser
from backhaul_router.config import Config
from backhaul_router.conversations import Conversations
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.queueing import TurnQueue
from backhaul_router.core.routing.assembly import Routing
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from backhaul_router.departures import Departures
from backhaul_router.engine_client import EngineClient
from backhaul_router.legs import Legs
from backhaul_router.lookups import Lookups
from backhaul_router.models import Models
from backhaul_router.observing import TurnObserver
from backhaul_router.owner_client import OwnerClient
from backhaul_router.passing import Passing
from backhaul_router.ports import Policy
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.registry_client import RegistryClient
from backhaul_router.second_chances import SecondChances
from backhaul_router.tenants_file import TenantsFile
from backhaul_router.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What a router was told, and what it learns while it runs."""

    config: Config
    policy: Policy
    tenants: Tenants | TenantsFile
    scopes: Scopes
    clock: Clock
    table: NodeTable
    routing: Routing
    fresh: FreshKeys
    observer: TurnObserver
    journal: Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Whom a router speaks to."""

    registry: RegistryClient
    owner: OwnerClient
    engines: EngineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What answers calls."""

    turns: Turns
    conversations: Conversations
    models: Models
    passing: Passing
    admission: Admission


def answering(known: Knowledge, others: Others, departures: Departures) -> Answering:
    """Returns what answers calls."""
    config = known.config
    return Answering(
        turns=_turns(known, others, departures),
        conversations=Conversations(
            registry=others.registry,
            owner=others.owner,
            table=known.table,
            tenants=known.tenants,
            scopes=known.scopes,
            clock=known.clock,
        ),
        models=Models(others.engines, known.table),
        passing=Passing(
            engines=others.engines,
            table=known.table,
            planner=known.routing.planner,
            live=known.routing.live,
            tenants=known.tenants,
            scopes=known.scopes,
        ),
        admission=Admission(
            turns=TurnQueue(max_turns=config.max_turns, max_queued=config.max_queued, limits=known.tenants.limits),
            queue_timeout_s=config.queue_timeout_s,
            max_held_bytes=int(config.max_held),
            clock=known.clock,
        ),
    )


def _turns(known: Knowledge, others: Others, departures: Departures) -> Turns:
    legs = Legs(
        engines=others.engines,
        owner=others.owner,
        live=known.routing.live,
        learning=known.routing.learning,
        departures=departures,
        policy=known.policy,
        observer=known.observer,
    )
    attempts = Attempts(
        legs=legs,
        table=known.table,
        planner=known.routing.planner,
        live=known.routing.live,
        retries=known.routing.retries,
        policy=known.policy,
        observer=known.observer,
    )
    return Turns(
        chooser=_chooser(known, others),
        attempts=attempts,
        legs=legs,
        table=known.table,
        live=known.routing.live,
        fresh=known.fresh,
        tenants=known.tenants,
        scopes=known.scopes,
        policy=known.policy,
        observer=known.observer,
        journal=known.journal,
    )


def _chooser(known: Knowledge, others: Others) -> Chooser:
    tokens = PromptTokens(others.engines, known.clock)
    second_chances = SecondChances(
        owner=others.owner,
        tokens=tokens,
        table=known.table,
        planner=known.routing.planner,
        clock=known.clock,
        budget_s=known.config.harvest_budget_s,
        keep_constraints=known.policy.keep_constraints,
    )
    lookups = Lookups(
        registry=others.registry,
        owner=others.owner,
        tokens=tokens,
        table=known.table,
        fresh=known.fresh,
        clock=known.clock,
        budget_s=known.config.lookup_budget_s,
    )
    return Chooser(
        lookups=lookups, second_chances=second_chances, planner=known.routing.planner, rates=known.routing.rates
    )
