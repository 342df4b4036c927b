"""Which engines can exchange blocks, as far as is known: those whose builds fit, and no engine with itself.

There are as many pairs as prefill times decode engines, but a handful of builds: those are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from backhaul_router.core.nodes import Engine, Role, exchange
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.target import Target
from backhaul_router.core.tensor_parallel import reads


class Build(NamedTuple):
    """What tells which engines fit one another."""

    role: Role
    compatibility_hash: str
    weights_digest: str
    block_size: int
    tp_size: int
    kv_head_count: int
    connector_version: str


def same_connector(one: Target, other: Target) -> bool:
    """Tells whether two engines have the same version of the connector, as far as is known."""
    mine, yours = (target.engine.connector_version if target.engine else "" for target in (one, other))
    return not mine or not yours or mine == yours


def partners_of(demand: Demand, leg: Leg) -> Sequence[Target]:
    """Returns the engines of which a leg needs one to exchange blocks with; empty when it needs none."""
    if leg is Leg.ALONE:
        return ()
    if leg is Leg.READ and demand.held and not demand.partners:
        return (demand.held.holder,)
    return demand.partners


class Partners:
    """Engines of the other role."""

    def __init__(self, partners: Sequence[Target], *, read: bool) -> None:
        """``read``: whether connectors read what others retained, which takes the same version of them."""
        self._read = read
        self._groups: defaultdict[Build, list[Target]] = defaultdict(list)
        for partner in partners:
            self._groups[_build_of(partner)].append(partner)
        self._fitting: dict[Build, list[Target]] = {}

    def of(self, target: Target) -> Iterator[Target]:
        """Returns those that an engine can exchange blocks with."""
        for partner in self._fitting_to(target):
            if _distinct(target, partner):
                yield partner

    def _fitting_to(self, target: Target) -> Sequence[Target]:
        build = _build_of(target)
        fitting = self._fitting.get(build)
        if fitting is None:
            groups = [group for group in self._groups.values() if _fit(target, group[0], read=self._read)]
            fitting = self._fitting[build] = [partner for group in groups for partner in group]
        return fitting


def keep_compatible(targets: Iterable[Target], partners: Sequence[Target], *, read: bool) -> list[Target]:
    """Returns the engines that can exchange blocks with at least one of the partners."""
    if len(partners) == 1:
        only = partners[0]
        return [target for target in targets if _distinct(target, only) and _fit(target, only, read=read)]
    others = Partners(partners, read=read)
    return [target for target in targets if any(others.of(target))]


def _build_of(target: Target) -> Build:
    engine = target.engine or Engine("")
    return Build(
        target.node.role,
        engine.compatibility_hash,
        engine.weights_digest,
        engine.block_size,
        engine.tp_size,
        engine.kv_head_count,
        engine.connector_version,
    )


def _fit(one: Target, other: Target, *, read: bool) -> bool:
    prefill, decode = (one, other) if one.node.role is Role.PREFILL else (other, one)
    if prefill.engine is None or decode.engine is None:
        return True
    if not exchange(prefill.engine, decode.engine):
        return False
    # What is read goes back with all that is computed beside it. A hand-off is vLLM's own, whatever the connector.
    heads = prefill.engine.kv_head_count or decode.engine.kv_head_count
    back = reads(prefill.engine.tp_size, decode.engine.tp_size, heads)
    return not read or (back and same_connector(one, other))


def _distinct(one: Target, other: Target) -> bool:
    if one.node.engine_url == other.node.engine_url:
        return False
    return one.engine is None or other.engine is None or one.engine.engine_id != other.engine.engine_id
