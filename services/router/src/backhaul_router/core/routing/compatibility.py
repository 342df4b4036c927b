"""Which engines can exchange blocks, as far as is known.

Engines with different NIXL compatibility hashes (vLLM's `nixl/metadata.py`, `compute_nixl_compatibility_hash`:
versions, model, dtypes, attention), different weights or different block sizes never exchange. Nor does an engine with
itself (one server that two agents list, in both roles): vLLM fails a turn whose blocks are its own.

There are as many pairs as prefill times decode engines, but a handful of builds: those are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.target import Target

Build = tuple[str, str, int, str]
"""What engines must have in common: compatibility hash, weights digest, block size, version of the connector. Empty, or
0, is unknown, and fits everything. The version is left empty where no connector reads what the other one retained: a
hand-off is vLLM's own."""


def reuses(target: Target) -> bool:
    """Tells whether an engine verifies what it reads: without the connector it takes any blocks for the prompt's."""
    return target.engine is not None and target.engine.reuse and bool(target.engine.connector_version)


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
        build = _build_of(target, self._read)
        fitting = self._fitting.get(build)
        if fitting is None:
            fitting = [partner for other, group in self._groups.items() if _fit(build, other) for partner in group]
            self._fitting[build] = fitting
        return (partner for partner in fitting if _distinct(target, partner))


def keep_compatible(targets: Iterable[Target], partners: Sequence[Target], *, read: bool) -> list[Target]:
    """Returns the engines that can exchange blocks with at least one of the partners."""
    others = Partners(partners, read=read)
    return [target for target in targets if next(others.of(target), None) is not None]


def _build_of(target: Target, read: bool) -> Build:
    engine = target.engine
    if engine is None:
        return "", "", 0, ""
    version = engine.connector_version if read else ""
    return engine.compatibility_hash, engine.weights_digest, engine.block_size, version


def _fit(one: Build, other: Build) -> bool:
    return all(not mine or not yours or mine == yours for mine, yours in zip(one, other, strict=True))


def _distinct(one: Target, other: Target) -> bool:
    if one.node.engine_url == other.node.engine_url:
        return False
    return one.engine is None or other.engine is None or one.engine.engine_id != other.engine.engine_id
