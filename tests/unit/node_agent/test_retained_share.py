"""Finished turns pin no more than their share of an engine's blocks."""

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.life import State
from tests.unit.node_agent.owned import LIMITS, OwnerTable, facts

SHARE = int(facts().block_count * LIMITS.retained_share)
BLOCKS = 4
"""Of each set that the table's engine reports."""
FITTING = SHARE // BLOCKS


def table_with(set_count: int) -> OwnerTable:
    table = OwnerTable()
    table.join()
    table.connect()
    for index in range(set_count):
        table.report(f"set-{index}")
    return table


def held(table: OwnerTable) -> list[str]:
    return [one.name.set_id for one in table.owner.sets(table.now) if one.state is State.HELD]


def test_nothing_is_released_within_the_share() -> None:
    table = table_with(FITTING)
    assert table.retention() == []
    assert len(held(table)) == FITTING


def test_beyond_it_the_oldest_are_released_and_no_more_than_needed() -> None:
    table = table_with(FITTING + 3)
    effects = table.retention()
    assert held(table) == [f"set-{index}" for index in range(3, FITTING + 3)]
    assert {effect.set_id for effect in effects if isinstance(effect, ev.SendRelease)} == {"set-0", "set-1", "set-2"}
    assert table.retention() == []


def test_a_set_that_a_prefill_engine_may_be_reading_is_passed_over() -> None:
    table = table_with(FITTING + 1)
    table.claim("set-0")
    table.retention()
    states = {one.name.set_id: one.state for one in table.owner.sets(table.now)}
    assert states["set-0"] is State.CLAIMED
    assert states["set-1"] is State.RELEASING
    assert len(held(table)) == FITTING - 1


def test_thousands_of_conversations_leave_no_more_than_the_share() -> None:
    table = table_with(0)
    for index in range(3 * FITTING):
        table.report(f"turn-{index}")
        for effect in table.retention():
            if isinstance(effect, ev.SendRelease):
                table.free(effect.set_id)
        assert table.owner.set_count <= FITTING
