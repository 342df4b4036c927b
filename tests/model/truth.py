"""What must never happen, judged from what really happened: nothing here asks the code under test."""

from dataclasses import dataclass

from backhaul_connector.anchors import MIN_STRIDE as STRIDE
from backhaul_node_agent.core.granting import Grant
from tests.model.agent import LIMITS, AgentProcess
from tests.model.engine import DecodeEngine, kv_of
from tests.model.prefill import Read


@dataclass(eq=False, slots=True)
class Given:
    """A grant that a router was given."""

    grant: Grant
    request_id: str
    agent: AgentProcess
    usable: bool = True
    """Whether its router may still use it, or has used it."""
    sent: bool = False
    """Whether a prefill engine has got the handle."""
    noted: bool = True
    """Whether the connector got to know of it: then the set is never granted again, however late it is."""

    @property
    def set_id(self) -> str:
        return self.grant.name.set_id


class Truth:
    """Everything that was granted and read of one incarnation."""

    def __init__(self, engine: DecodeEngine) -> None:
        self.given: list[Given] = []
        self._engine = engine
        self._reading: list[Read] = []
        self._used: set[str] = set()

    def usable(self, set_id: str, shown: float) -> list[Given]:
        """Returns the grants of a set under which a read may be under way while the engine's clock shows `shown`."""
        return [one for one in self.given if one.set_id == set_id and one.usable and shown < one.grant.deadline]

    def granted(self, given: Given, now: float, *, at_once: bool) -> None:
        """Judges a grant when it is answered; `at_once` when no time has passed since it was decided."""
        grant = given.grant
        set_id, shown = grant.name.set_id, self._engine.clock.at(now)
        assert grant.name.engine_id == self._engine.engine_id, "granted for an engine that is gone"
        assert set_id in self._engine.turns, "a foreign id was granted"
        assert set_id in self._engine.leases, "granted although freed"
        assert not given.agent.drained, "granted by a drained node"
        others = [one for one in self.given if one.set_id == set_id and one.usable]
        assert not [one for one in others if one.noted or shown < one.grant.deadline], "granted twice"
        assert grant.deadline <= self._engine.leases[set_id] - LIMITS.margin_s, "granted past the engine's deadline"
        assert grant.deadline <= shown + LIMITS.claim_ttl_s, "granted for longer than a fence waits"
        assert not at_once or grant.deadline - shown >= LIMITS.least_left_s, "granted too late for a read"
        self.given.append(given)

    def released(self, set_id: str, now: float) -> None:
        """Judges a release when it is sent."""
        self.addressed(set_id)
        assert not self.usable(set_id, self._engine.clock.at(now)), "released under a claim"

    def superseded(self, set_id: str) -> None:
        """Judges that nobody needs a set because a newer one covers it: another one must begin with what it holds."""
        older = self._engine.turns[set_id][:-1]
        sure = older[: len(older) // STRIDE * STRIDE]
        others = [turn for name, turn in self._engine.turns.items() if name != set_id]
        assert sure, "too short to be sure of anything"
        assert any(turn[: len(sure)] == sure for turn in others), "superseded by another history"

    def renewed(self, set_id: str, now: float) -> None:
        """Judges a renewal when it is sent."""
        self.addressed(set_id)
        age_s = self._engine.clock.at(now) - self._engine.ended_at[set_id]
        assert age_s <= LIMITS.max_retention_s + 1.0, "renewed for ever"

    def addressed(self, set_id: str) -> None:
        """Judges whatever is sent to an engine about a set."""
        assert set_id in self._engine.turns, "a foreign id was touched"

    def started(self, read: Read, now: float) -> None:
        """Judges the start of a read."""
        others = [one for one in self._reading if one.set_id == read.set_id and one is not read]
        shown = self._engine.clock.at(now)
        assert not [one for one in others if shown < one.deadline], "two reads of one set overlap"
        self._reading.append(read)

    def used(self, read: Read, now: float) -> None:
        """Judges a read that was not failed: its content goes into the prefill engine's cache."""
        right = kv_of(read.prompt, read.identity)[: read.count]
        assert read.copied[: read.count] == right, "wrong content was used"
        assert self._engine.clock.at(now) < read.deadline, "a late read was used"
        assert read.set_id not in self._used, "one set was used twice"
        self._used.add(read.set_id)
        self._reading = [one for one in self._reading if one is not read]
