"""Whatever happens to the connection, the agent ends with what the ledger holds."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul_connector import wire
from backhaul_connector.ledger import Ledger
from tests.fakes.block_sets import report

SETS = {name: report(name, tokens=[1] * 20) for name in "abcd"}
MAX_QUEUED = 3

set_ids = st.sampled_from(sorted(SETS))
deadline_maps = st.dictionaries(set_ids, st.integers(500, 503).map(float), max_size=4)
operations = st.one_of(
    st.tuples(st.just("retained"), set_ids),
    st.tuples(st.just("freed"), st.lists(set_ids, max_size=3)),
    st.tuples(st.just("deadlines"), deadline_maps),
    st.tuples(st.just("claimed"), set_ids),
    st.tuples(st.just("returned"), set_ids),
    st.tuples(st.just("memory"), st.none()),
    st.tuples(st.just("connect"), st.none()),
    st.tuples(st.just("disconnect"), st.none()),
    st.tuples(st.just("take"), st.integers(1, 4)),
)


class Agent:
    """Holds what it was told, and starts anew when the connector does."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.connected = False
        self.sets: dict[str, wire.BlockSetReport] = {}
        self.known_count = -1
        """As the last memory figures imply, and what was heard after them."""
        self._replayed: set[str] = set()

    def connect(self) -> None:
        self.connected, self.known_count = True, -1
        self._replayed = set()
        for message in self._ledger.connect():
            self._apply(message)

    def disconnect(self) -> None:
        self.connected = False
        self._ledger.disconnect()

    def take(self, limit: int) -> None:
        try:
            for _ in range(limit):
                if (message := self._ledger.take()) is not None:
                    self._apply(message)
        except BufferError:
            self.disconnect()
            self.connect()

    def _apply(self, message: wire.FromConnector) -> None:
        match message:
            case wire.Retained(set=made, replayed=replayed):
                self.sets[made.set_id] = made
                if replayed:
                    self._replayed.add(made.set_id)
            case wire.Replayed(set_count=count):
                assert count == len(self._replayed)
                self.sets = {set_id: self.sets[set_id] for set_id in self._replayed}
            case wire.Freed(set_ids=gone):
                for set_id in gone:
                    del self.sets[set_id]
                self.known_count = -1
            case wire.Deadlines(deadlines=deadlines):
                for set_id, deadline in deadlines.items():
                    self.sets[set_id] = msgspec.structs.replace(self.sets[set_id], deadline=deadline)
            case wire.Memory(free_count=count):
                assert count == len(self.sets), "figures that were true before, or after, what was heard"
                self.known_count = count
            case _:
                raise AssertionError(message)


class Engine:
    """The truth: what a plain dictionary says after the same events."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.sets: dict[str, wire.BlockSetReport] = {}

    def retained(self, set_id: str) -> None:
        self._ledger.retained(SETS[set_id])
        self.sets[set_id] = SETS[set_id]

    def freed(self, gone: list[str]) -> None:
        self._ledger.freed(gone)
        for set_id in gone:
            self.sets.pop(set_id, None)

    def deadlines(self, deadlines: dict[str, float]) -> None:
        self._ledger.deadlines(deadlines)
        for set_id in deadlines.keys() & self.sets.keys():
            self.sets[set_id] = msgspec.structs.replace(self.sets[set_id], deadline=deadlines[set_id])

    def mark(self, set_id: str, claimed: bool) -> None:
        self._ledger.mark(set_id, claimed=claimed)
        if set_id in self.sets:
            self.sets[set_id] = msgspec.structs.replace(self.sets[set_id], claimed=claimed)


def unclaimed(sets: dict[str, wire.BlockSetReport]) -> dict[str, wire.BlockSetReport]:
    """Returns the sets as the connector reports them within a session: who claims is the agent's own knowledge."""
    return {set_id: msgspec.structs.replace(made, claimed=False) for set_id, made in sets.items()}


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(operations, min_size=15, max_size=40))
def test_an_agent_that_applies_replay_and_messages_has_exactly_the_ledgers_sets(
    steps: list[tuple[str, object]],
) -> None:
    ledger = Ledger(max_queued=MAX_QUEUED)
    agent, engine = Agent(ledger), Engine(ledger)
    for name, value in steps:
        match name, value:
            case "retained", str(set_id):
                engine.retained(set_id)
            case "freed", list(gone):
                engine.freed(gone)
            case "deadlines", dict(deadlines):
                engine.deadlines(deadlines)
            case (("claimed" | "returned"), str(set_id)):
                engine.mark(set_id, name == "claimed")
            case "memory", _:
                ledger.memory(wire.Memory(free_count=len(engine.sets), waiting_count=0))
            case "connect", _:
                agent.connect()
            case "disconnect", _:
                agent.disconnect()
            case "take", int(limit) if agent.connected:
                agent.take(limit)

    if agent.connected:
        agent.take(MAX_QUEUED + 1)
        assert unclaimed(agent.sets) == unclaimed(engine.sets)
        ledger.memory(wire.Memory(free_count=len(engine.sets), waiting_count=0))
        agent.take(1)
        assert not engine.sets or agent.known_count == len(engine.sets)
    agent.disconnect()
    agent.connect()
    assert agent.sets == engine.sets


def test_how_full_the_engine_is_is_told_once_the_latest_only_and_after_what_was_said_before() -> None:
    ledger = Ledger()
    ledger.connect()
    ledger.memory(wire.Memory(free_count=9, waiting_count=0))
    assert ledger.take() is None, "nothing is retained"
    ledger.retained(SETS["a"])
    for free in (8, 7, 7):
        ledger.memory(wire.Memory(free_count=free, waiting_count=0))
    ledger.freed([])

    assert [ledger.take() for _ in range(3)] == [
        wire.Retained(set=SETS["a"]),
        wire.Memory(free_count=7, waiting_count=0),
        None,
    ]
    ledger.connect()
    assert ledger.take() is None, "figures from before the replay"


def test_a_message_is_taken_once_and_in_order() -> None:
    ledger = Ledger()
    ledger.connect()
    ledger.retained(SETS["a"])
    ledger.deadlines({"a": 501.0})
    ledger.freed(["a"])

    assert [ledger.take() for _ in range(4)] == [
        wire.Retained(set=SETS["a"]),
        wire.Deadlines(deadlines={"a": 501.0}),
        wire.Freed(set_ids=["a"]),
        None,
    ]


def test_only_what_is_ours_and_changed_is_reported() -> None:
    woken: list[bool] = []
    ledger = Ledger(wake=lambda: woken.append(True))
    ledger.connect()
    ledger.retained(SETS["a"])
    assert ledger.take() is not None

    ledger.freed(["foreign"])
    ledger.deadlines({"foreign": 900.0, "a": SETS["a"].deadline})
    ledger.mark("foreign", claimed=True)

    assert ledger.take() is None
    assert len(woken) == 1


def test_each_report_wakes_the_link_without_a_lock_held() -> None:
    seen: list[wire.FromConnector | None] = []
    ledger = Ledger(wake=lambda: seen.append(ledger.take()))
    ledger.connect()
    ledger.retained(SETS["a"])
    ledger.deadlines({"a": 501.0})
    ledger.freed(["a"])
    ledger.identify(wire.Identity(weights_digest="d"))

    assert [type(message) for message in seen] == [wire.Retained, wire.Deadlines, wire.Freed, wire.Identity]


def test_the_identity_comes_first_on_every_session_that_starts_after_it_is_known() -> None:
    ledger = Ledger()
    ledger.identify(wire.Identity(weights_digest="d"))
    ledger.retained(SETS["a"])

    for _ in range(2):
        assert [*ledger.connect()] == [
            wire.Identity(weights_digest="d"),
            wire.Retained(set=SETS["a"], replayed=True),
            wire.Replayed(set_count=1),
        ]
        ledger.disconnect()


def test_nothing_waits_while_no_agent_is_connected() -> None:
    ledger = Ledger()
    ledger.retained(SETS["a"])

    assert ledger.take() is None
    assert ledger.dropped_count == 1


def test_the_queue_is_bounded_and_says_that_messages_were_dropped() -> None:
    ledger = Ledger(max_queued=2)
    ledger.connect()
    for name in "abcd":
        ledger.retained(SETS[name])

    assert ledger.dropped_count == 2
    with pytest.raises(BufferError):
        ledger.take()
    ledger.disconnect()
    ledger.disconnect()
    assert ledger.dropped_count == 4
    assert ledger.take() is None
    assert len([*ledger.connect()]) == 5
    assert ledger.take() is None


def test_a_claim_taken_back_is_no_claim() -> None:
    ledger = Ledger()
    ledger.retained(SETS["a"])
    ledger.mark("a", claimed=True)
    ledger.mark("a", claimed=False)

    assert next(ledger.connect()) == wire.Retained(set=SETS["a"], replayed=True)


def test_leases_that_are_no_sets_are_foreign_as_the_rank_with_most_has_them() -> None:
    ledger = Ledger()
    assert ledger.foreign_count == 0
    ledger.leases({0: 3, 1: 2})
    ledger.retained(SETS["a"])
    assert ledger.foreign_count == 2
    ledger.leases({0: 0})
    assert ledger.foreign_count == 1
    ledger.leases({1: 0})
    assert ledger.foreign_count == 0
