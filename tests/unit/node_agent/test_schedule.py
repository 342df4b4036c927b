"""What is due is found without looking at all sets, and nothing is overlooked."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.life import Instant, Life, Pointer, State
from backhaul_node_agent.core.schedule import Schedule
from tests.unit.node_agent.owned import LIMITS, OFFSET, OwnerTable, standing

_SETS = 4


class EverySet(Schedule):
    """Names every set whenever it is asked, so that each is looked at on every tick."""

    def __init__(self) -> None:
        super().__init__()
        self._lives: dict[str, Life] = {}

    def follow(self, set_id: str, life: Life | None) -> None:
        """Remembers a life."""
        self._lives.pop(set_id, None)
        if life is not None:
            self._lives[set_id] = life
        self.removing = {name: None for name, one in self._lives.items() if one.pointer is Pointer.REMOVING}

    def due(self, at: Instant) -> list[str]:
        """Names all."""
        return list(self._lives)

    def ending(self, at: Instant, within_s: float) -> list[str]:
        """Names all that are HELD."""
        return [set_id for set_id, life in self._lives.items() if life.state is State.HELD]

    def old(self, at: Instant, age_s: float) -> list[str]:
        """Names all that are HELD."""
        return self.ending(at, age_s)


def _report(table: OwnerTable, set_id: str, choice: int) -> None:
    ttl_s = (4.0, 20.0, 40.0, 100.0, 480.0)[choice % 5]
    age_s = (0.0, 100.0, LIMITS.max_retention_s - 20.0)[choice % 3]
    # Some continue one another: the newer one makes the older needless.
    table.report(set_id, ttl_s=ttl_s, age_s=age_s, keys=(f"key-{choice % 4}",), granted=choice == 7)


def _replay(table: OwnerTable, set_id: str, choice: int) -> None:
    table.connect(last_session=("session-1", "another")[choice % 2], replay=False)
    table.report(set_id, replayed=True, granted=choice % 4 == 0)
    table.replayed()


def _jump(table: OwnerTable, set_id: str, choice: int) -> None:
    for _ in range(choice % 4):
        table.ping(offset=OFFSET + 100.0 * choice)


_DONE: dict[str, Callable[[OwnerTable, str, int], Any]] = {
    "report": _report,
    "replay": _replay,
    "jump": _jump,
    "claim": lambda table, set_id, choice: table.claim(set_id, request_id=f"request-{choice}"),
    "return": lambda table, set_id, choice: table.give_back(f"request-{choice}"),
    "free": lambda table, set_id, choice: table.free(set_id),
    "confirm": lambda table, set_id, choice: table.confirm(set_id, 25.0 * choice),
    "release": lambda table, set_id, choice: table.release(set_id),
    "memory": lambda table, set_id, choice: table.memory(free_count=1000 - 140 * choice),
    "written": lambda table, set_id, choice: table.hear(ev.PointersWritten("engine-1", [set_id])),
    "removed": lambda table, set_id, choice: table.hear(ev.PointersRemoved("engine-1", [set_id])),
    "up": lambda table, set_id, choice: table.publishing(),
    "down": lambda table, set_id, choice: table.hear(ev.PublisherDown("engine-1")),
    "leave": lambda table, set_id, choice: table.disconnect(),
    "lost": lambda table, set_id, choice: table.hear(ev.LeaseLost()),
    "join": lambda table, set_id, choice: table.join(lasts_s=50.0 * choice),
    "tick": lambda table, set_id, choice: table.passes((0.25, 1.0, 5.0, 32.25)[choice % 4], step_s=60.0),
    "retain": lambda table, set_id, choice: table.retention(),
}
"""What may happen. Each gets a set and a choice."""

# Sets come and time passes about as often as all the rest happens: else little lives long enough.
_OFTEN = (*("report",) * 6, *("tick",) * 8, *("retain",) * 4, *("claim",) * 6, "release", "down")
_LENGTH = 250


def _history(rng: Random) -> Iterator[tuple[str, int, int]]:
    names = [*_OFTEN, *_DONE]
    return ((rng.choice(names), rng.randint(1, _SETS), rng.randrange(8)) for _ in range(_LENGTH))


def _looked_at(table: OwnerTable) -> None:
    """Lets a table look at every set."""
    for engine in table.owner._held.engines.values():
        if not engine.lives and not isinstance(engine.schedule, EverySet):
            engine.schedule = EverySet()


def _lives(table: OwnerTable) -> dict[str, dict[str, Life]]:
    return {engine_id: engine.lives for engine_id, engine in table.owner._held.engines.items()}


def _in_any_order(effects: list[ev.Effect]) -> Counter[object]:
    return Counter(part for effect in effects for part in _parts(effect))


def _parts(effect: ev.Effect) -> Iterator[object]:
    match effect:
        case ev.SendRenewal():
            yield replace(effect, set_ids=tuple(sorted(effect.set_ids)))
        case ev.Decided(reason=ev.Reason.UNCONFIRMED):
            # Said once, of whichever set is looked at first.
            yield effect.reason
            yield replace(effect, reason=ev.Reason.RENEWED)
        case ev.Publish() | ev.Unpublish() | ev.LetGo():
            yield type(effect), effect.block_set.set_id
        case _:
            yield effect


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_a_tick_does_what_one_does_that_looks_at_every_set(seed: int) -> None:
    quick, plain = standing(), standing()
    _looked_at(plain)
    for what, number, choice in _history(Random(seed)):
        seen = []
        for table in (quick, plain):
            table.effects.clear()
            _DONE[what](table, f"set-{number}", choice)
            _looked_at(plain)
            seen.append((_in_any_order(table.effects), _lives(table)))
        assert seen[0] == seen[1]


class Unlisted(dict[str, Life]):
    """Lives that may be asked for by name only."""

    def __init__(self, lives: dict[str, Life]) -> None:
        super().__init__(lives)
        self.asked: list[str] = []

    def __getitem__(self, set_id: str) -> Life:
        self.asked.append(set_id)
        return super().__getitem__(set_id)

    def values(self) -> Any:
        """Fails."""
        raise AssertionError("all sets are looked at")

    items = __iter__ = values


@pytest.mark.parametrize("count", [10, 1_000])
def test_a_tick_looks_at_the_sets_that_are_due_and_at_no_other(count: int) -> None:
    table = standing()
    table.retention()
    for number in range(count):
        table.report(f"far-{number}", block_ids=())
    table.report("near", ttl_s=30.0)
    engine = table.owner._held.engines["engine-1"]
    engine.lives = lives = Unlisted(engine.lives)

    table.passes(0.2)
    table.retention()

    assert set(lives.asked) == {"near"}
    assert ev.SendRenewal("engine-1", ("near",)) in table.effects
