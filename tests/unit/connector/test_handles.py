"""A prefill engine uses a handle once, while it is certain that there is time for it."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from backhaul_connector.handles import START_MARGIN_S, USED, Handles

NOW = 100.0


@dataclass
class FakeClocks:
    """Clocks that run as the own one does, for the engines that are known."""

    known: set[str] = field(default_factory=lambda: {"engine-d"})
    jumps: set[str] = field(default_factory=set)
    watched: list[tuple[str, str, int]] = field(default_factory=list)

    def watch(self, engine_id: str, host: str, port: int) -> None:
        self.watched.append((engine_id, host, port))

    def jumped(self, engine_id: str) -> bool:
        return engine_id in self.jumps

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None:
        return deadline - now if engine_id in self.known else None


def handle(set_id: str = "set-1", *, engine_id: str = "engine-d", left_s: float = 30.0) -> dict[str, Any]:
    """Returns what is looked at of a handle with `left_s` to go."""
    return {
        "remote_engine_id": engine_id,
        "remote_request_id": set_id,
        "remote_host": "host",
        "remote_port": 5601,
        "remote_blocks_expiry_time": NOW + left_s,
    }


def test_a_handle_is_used_once() -> None:
    handles = Handles(FakeClocks())

    assert handles.refuses(handle(), NOW) == ""
    assert handles.refuses(handle(left_s=25.0), NOW) == USED
    assert handles.refuses(handle("set-2"), NOW) == ""
    assert handles.refuses(handle(engine_id="engine-e"), NOW) == ""


@pytest.mark.parametrize("left_s", [START_MARGIN_S, 0.0, -1.0])
def test_a_handle_whose_read_could_not_start_in_time_is_refused(left_s: float) -> None:
    handles = Handles(FakeClocks())

    assert handles.refuses(handle(left_s=left_s), NOW) == "expired"
    assert handles.refuses(handle("set-2", left_s=START_MARGIN_S + 0.1), NOW) == ""


def test_a_handle_that_was_refused_was_not_used() -> None:
    handles = Handles(FakeClocks())
    handles.refuses(handle(left_s=0.0), NOW)

    assert handles.refuses(handle(), NOW) == ""


def test_a_handle_of_an_engine_whose_clock_jumped_is_refused() -> None:
    assert Handles(FakeClocks(jumps={"engine-d"})).refuses(handle(), NOW) == "clock_jumped"


def test_a_clock_that_is_not_known_yet_is_asked_for_and_left_to_the_end_fence() -> None:
    clocks = FakeClocks(known=set())

    assert Handles(clocks).refuses(handle(left_s=0.0), NOW) == ""
    assert clocks.watched == [("engine-d", "host", 5601)]


def test_no_more_handles_are_remembered_than_may_be() -> None:
    handles = Handles(FakeClocks(), max_used=2)
    for set_id in ("set-1", "set-2", "set-3"):
        handles.refuses(handle(set_id), NOW)

    assert [handles.refuses(handle(set_id), NOW) for set_id in ("set-3", "set-2")] == [USED, USED]
    assert handles.refuses(handle("set-1"), NOW) == ""
