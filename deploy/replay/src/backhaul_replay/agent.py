"""What the node agent does beside the engine: which ended turns keep their blocks, by its own policies and budget."""

from dataclasses import dataclass

from backhaul_node_agent.core.retention.budget import EngineBudget
from backhaul_node_agent.core.retention.gaps import Crowd, Gaps
from backhaul_node_agent.core.retention.policy import Kept
from backhaul_node_agent.core.retention.ranking import Ranking
from backhaul_replay.clock import Clock
from backhaul_replay.engine import Engine, Request
from backhaul_replay.hardware import Hardware
from backhaul_replay.policies import Contender


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be pinned; see ``backhaul_node_agent.core.retention.budget``."""

    share: float = 0.5
    mark: float = 0.9

    def __post_init__(self) -> None:
        """Raises ValueError that names what is no share."""
        for name in ("share", "mark"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class Retained:
    """A set that can be claimed."""

    set_id: str
    request: Request
    crowd: Crowd
    since_s: float


class Agent:
    """Owns what one engine retains, at most one set per conversation."""

    def __init__(self, contender: Contender, gaps: Gaps, budget: Budget, hardware: Hardware, clock: Clock) -> None:
        self._contender = contender
        self._policy = contender.make(gaps)
        self._hardware = hardware
        self._clock = clock
        # One more: the null block.
        self._budget = EngineBudget(hardware.block_count + 1, share=budget.share, mark=budget.mark)
        self._ranking = Ranking()
        self._sets: dict[str, Retained] = {}
        self._looks = False
        self.engine = Engine(hardware, clock, changed=self._look_soon)

    def retain(self, set_id: str, request: Request, crowd: Crowd) -> None:
        """Takes what an ended turn has pinned."""
        if self._contender.budget and self.engine.waiting_count:
            # The connector retains nothing while requests wait for blocks.
            self.engine.release(request)
            return
        retained = Retained(set_id, request, crowd, self._clock.now)
        self._sets[set_id] = retained
        self._budget.retain(set_id, request.block_ids)
        self._ranking.add(set_id)
        self._clock.after(self._contender.max_retention_s, lambda: self._end(retained))
        self._look_soon()

    def claim(self, set_id: str) -> Retained | None:
        """Hands a set out; it stays pinned until it is `free`."""
        self._ranking.drop(set_id)
        return self._sets.pop(set_id, None)

    def free(self, retained: Retained) -> None:
        """Frees the blocks of a set that cannot be claimed any more."""
        self._budget.freed(retained.set_id, retained.request.block_ids)
        self.engine.release(retained.request)

    def _end(self, retained: Retained) -> None:
        if self.claim(retained.set_id) is not None:
            self.free(retained)

    def _look_soon(self) -> None:
        if self._contender.budget and not self._looks:
            self._looks = True
            self._clock.after(self._hardware.look_s, self._look)

    def _look(self) -> None:
        """Releases what is worth least until the rest is within the budget."""
        self._looks = False
        self._budget.saw(free_count=self.engine.free_count, waiting_count=self.engine.waiting_count)
        if not self._budget.surplus:
            return
        self._ranking.look(lambda set_id: self._policy.worth(self._kept(self._sets[set_id])), self._clock.now)
        while self._budget.surplus and (set_id := self._ranking.pop_least()) is not None:
            retained = self._sets.pop(set_id)
            self._budget.release(set_id, retained.request.block_ids)
            self._free_later(retained)

    def _free_later(self, retained: Retained) -> None:
        self._clock.after(self._hardware.release_s, lambda: self.free(retained))

    def _kept(self, retained: Retained) -> Kept:
        return Kept(
            set_id=retained.set_id,
            crowd=retained.crowd,
            token_count=retained.request.num_tokens,
            block_count=max(1, self._budget.alone(retained.set_id)),
            age_s=self._clock.now - retained.since_s,
        )
