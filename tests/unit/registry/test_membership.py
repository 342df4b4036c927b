import pytest

from backhaul_common.errors import AbortedError, AlreadyExistsError
from backhaul_registry.core.membership import Create, Replace, Stored, Write, decide_join, decide_keep
from tests.unit.registry.values import node

MINE, OLD = 7, 5


@pytest.mark.parametrize(
    ("stored", "write"),
    [
        pytest.param(None, Create(), id="no record"),
        pytest.param(Stored(None, OLD, 3), Replace(3), id="unreadable"),
        pytest.param(Stored(node("s2"), 0, 3), Replace(3), id="without a lease"),
        pytest.param(Stored(node("s1"), MINE, 3), Replace(3), id="same lease"),
        pytest.param(Stored(node("s1"), OLD, 3), Replace(3, superseded_lease_id=OLD), id="same session"),
    ],
)
def test_a_join_gets_a_record_that_nobody_else_holds(stored: Stored | None, write: Write) -> None:
    assert decide_join(stored, node("s1"), MINE) == write


def test_a_join_is_refused_while_another_session_holds_the_record() -> None:
    with pytest.raises(AlreadyExistsError, match="NODE_TAKEN"):
        decide_join(Stored(node("s2"), OLD, 3), node("s1"), MINE)


@pytest.mark.parametrize(
    ("stored", "write"),
    [
        pytest.param(None, Create(), id="no record"),
        pytest.param(Stored(node("s1"), MINE, 3), Replace(3), id="own record"),
        pytest.param(Stored(None, MINE, 3), Replace(3), id="unreadable under the own lease"),
    ],
)
def test_a_joined_node_keeps_its_record(stored: Stored | None, write: Write) -> None:
    assert decide_keep(stored, node("s1"), MINE) == write


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(Stored(node("s2"), OLD, 3), id="other session"),
        pytest.param(Stored(node("s1"), OLD, 3), id="other stream of the session"),
        pytest.param(Stored(None, 0, 3), id="unreadable"),
    ],
)
def test_a_joined_node_has_lost_a_record_under_another_lease(stored: Stored) -> None:
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        decide_keep(stored, node("s1"), MINE)
