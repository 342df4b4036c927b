"""Which engines can exchange blocks, as far as is known.

Engines with different NIXL compatibility hashes (vLLM's `nixl/metadata.py`, `compute_nixl_compatibility_hash`:
versions, model, dtypes, attention), different weights or different block sizes never exchange. Nor do engines of
tensor-parallel sizes that vLLM refuses when they shake hands, nor an engine with itself (one server that two
agents list, in both roles): vLLM fails a turn whose blocks are its own.

There are as many pairs as prefill times decode engines, but a handful of builds: those are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from backhaul_router.core.nodes import Role
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.target import Target
from backhaul_router.core.tensor_parallel import reads


class Build(NamedTuple):
    """What tells which engines fit one another. Empty, or 0, is unknown, and fits everything."""

    common: tuple[str, str, int, str]
    """What both must have: compatibility hash, weights digest, block size, version of the connector. The version is
    left empty where no connector reads what the other one retained: a hand-off is vLLM's own."""
    role: Role
    tp_size: int
    kv_head_count: int


def reuses(target: Target) -> bool:
    """Tells whether an engine verifies what it reads: without the connector it takes any blocks for the prompt's."""
    return target.engine is not None and target.engine.reuse and bool(target.engine.connector_version)


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
            self._groups[_build_of(partner, read)].append(partner)
        self._fitting: dict[Build, list[Target]] = {}

    def of(self, target: Target) -> Iterator[Target]:
        """Returns those that an engine can exchange blocks with."""
        for partner in self._of_build(_build_of(target, self._read)):
            if _distinct(target, partner):
                yield partner

    def _of_build(self, build: Build) -> Sequence[Target]:
        fitting = self._fitting.get(build)
        if fitting is None:
            builds = [other for other in self._groups if _fit(build, other, read=self._read)]
            fitting = [partner for other in builds for partner in self._groups[other]]
            self._fitting[build] = fitting
        return fitting


def keep_compatible(targets: Iterable[Target], partners: Sequence[Target], *, read: bool) -> list[Target]:
    """Returns the engines that can exchange blocks with at least one of the partners."""
    others = Partners(partners, read=read)
    return [target for target in targets if any(others.of(target))]


def _build_of(target: Target, read: bool) -> Build:
    engine, role = target.engine, target.node.role
    if engine is None:
        return Build(("", "", 0, ""), role, 0, 0)
    version = engine.connector_version if read else ""
    common = engine.compatibility_hash, engine.weights_digest, engine.block_size, version
    return Build(common, role, engine.tp_size, engine.kv_head_count)


def _fit(one: Build, other: Build, *, read: bool) -> bool:
    if not all(not mine or not yours or mine == yours for mine, yours in zip(one.common, other.common, strict=True)):
        return False
    prefill, decode = (one, other) if one.role is Role.PREFILL else (other, one)
    heads = one.kv_head_count or other.kv_head_count
    handed_off = reads(decode.tp_size, prefill.tp_size, heads)
    # What is read goes back with all that is computed beside it.
    return handed_off and (not read or reads(prefill.tp_size, decode.tp_size, heads))


def _distinct(one: Target, other: Target) -> bool:
    if one.node.engine_url == other.node.engine_url:
        return False
    return one.engine is None or other.engine is None or one.engine.engine_id != other.engine.engine_id
