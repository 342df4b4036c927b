"""Which engines can serve a leg as far as the node table says: worked out once for each version of it.

The filters that always run (role, model, ready, compatible) say the same for as long as the table does. There are as
many pairs of engines as prefill times decode engines: a turn must not look at them all, nor even at each engine.
"""

from collections.abc import Sequence

from backhaul_router.core.nodes import NodeTable, Role
from backhaul_router.core.routing.compatibility import partners_of
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.filters.compatible import CompatibleFilter
from backhaul_router.core.routing.filters.role import ROLES
from backhaul_router.core.routing.target import Target, targets_of

MAX_KNOWN = 8192
"""Answers remembered; beyond it all are worked out anew. Adapters multiply them."""

Targets = tuple[Target, ...]


class Reach:
    """Remembers who can serve what, until the table changes. Equal answers are the same object."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._version = table.version
        self._compatible = CompatibleFilter()
        self._able: dict[tuple[Role, str], Targets] = {}
        self._known: dict[tuple[Leg, str, object], tuple[Sequence[Target], Targets]] = {}
        """By leg, model and the key of its partner: the partners, and who can exchange blocks with one of them."""
        self._answers: dict[tuple[Role, str], list[Targets]] = {}

    def able(self, role: Role, model: str) -> Targets:
        """Returns the engines of a role that serve a model: ready ones; if there is none, those that can be used."""
        self._refresh()
        targets = self._able.get((role, model))
        if targets is None:
            targets = tuple(targets_of(self._table.ready(role, model)))
            if targets:
                # Of models that nobody serves there are as many as clients can name.
                self._able[role, model] = targets
        return targets

    def paired(self, leg: Leg, demand: Demand) -> Targets:
        """Returns the able engines that can exchange blocks with one of the leg's partners; all where it has none."""
        able = self.able(ROLES[leg], demand.model)
        partners = partners_of(demand, leg)
        if not partners or not able:
            return able
        name = leg, demand.model, partners[0].key if len(partners) == 1 else len(partners)
        known = self._known.get(name)
        if known is None or not _same(known[0], partners):
            answer = self._canonical(leg, demand, tuple(self._compatible.keep(demand, leg, able)))
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[name] = partners, answer
        return known[1]

    def _canonical(self, leg: Leg, demand: Demand, answer: Targets) -> Targets:
        answers = self._answers.setdefault((ROLES[leg], demand.model), [self.able(ROLES[leg], demand.model)])
        for other in answers:
            if _same(other, answer):
                return other
        answers.append(answer)
        return answer

    def _refresh(self) -> None:
        if self._version != self._table.version:
            self._version = self._table.version
            for remembered in (self._able, self._known, self._answers):
                remembered.clear()


def _same(one: Sequence[Target], other: Sequence[Target]) -> bool:
    return one is other or (len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True)))
