"""Targets and demands as tests need them."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from backhaul_router.core.nodes import Engine
from backhaul_router.core.routing.demand import Demand, Held
from backhaul_router.core.routing.reports import EngineReport, Reports
from backhaul_router.core.routing.target import Target
from tests.fakes.clock import FakeClock
from tests.unit.router.test_nodes import node

_OF_ENGINES = {field.name for field in fields(Engine)}


def target(node_id: str, **values: Any) -> Target:
    """Returns the only engine of a node; ``values`` are fields of either. Ids begin with the role's letter."""
    of_engine = {name: values.pop(name) for name in _OF_ENGINES & values.keys()}
    engine = Engine(
        **{
            "engine_id": f"{node_id}-engine",
            "compatibility_hash": "h",
            "weights_digest": "w",
            "connector_version": "1",
            "reuse": True,
            "block_size": 16,
            **of_engine,
        }
    )
    made = node(node_id, **{"engines": (engine,), **values})
    return Target(made, engine if made.engines else None)


def demand(**values: Any) -> Demand:
    """Returns what a turn of 1,000 tokens asks for; ``holder`` holds 800 of them."""
    holder = values.pop("holder", None)
    held = Held(holder, 800) if holder else None
    return Demand(**{"model": "m", "token_count": 1000, "held": held, **values})


def ids(targets: Iterable[Target]) -> list[str]:
    """Returns the ids of the targets' nodes."""
    return [target.node.node_id for target in targets]


def reports_of(reports: Mapping[str, EngineReport]) -> Reports:
    """Returns the reports of engines by the id of their node."""
    taken = Reports(FakeClock().monotonic)
    for node_id, report in reports.items():
        taken.take((node_id, f"{node_id}-engine"), report)
    return taken
