"""A read with a deadline counts only if it certainly completed before it."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from backhaul_connector.fence import HOLD_S, EndFence

DEADLINE = 100.0


@dataclass
class FakeClocks:
    """Clocks that run as the own one does, for the engines that are known."""

    known: set[str] = field(default_factory=lambda: {"engine-d"})
    asked: set[str] = field(default_factory=set)
    watched: list[tuple[str, str, int]] = field(default_factory=list)

    def watch(self, engine_id: str, host: str, port: int) -> None:
        self.watched.append((engine_id, host, port))

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None:
        return deadline - now if engine_id in self.known else None

    def measuring(self, engine_id: str) -> bool:
        return engine_id in self.asked


def read(
    blocks: tuple[list[int], ...] = ([1, 2],), deadline: float | None = DEADLINE, engine_id: str = "engine-d"
) -> Any:
    """Returns what of vLLM's ``ReqMeta`` the fence looks at."""
    remote = SimpleNamespace(engine_id=engine_id, host="10.0.0.1", port=5601, blocks_expiry_time=deadline)
    return SimpleNamespace(remote=remote, local_block_ids=blocks)


def late(fence: EndFence, completed: set[str], failed: set[str], now: float) -> set[str]:
    """Returns which reads fail that vLLM has not failed itself."""
    over, bad = fence.judge(completed, failed, now)
    assert over == completed
    return bad - failed


def test_a_read_that_completes_in_time_counts() -> None:
    fence = EndFence(FakeClocks())
    fence.started({"r": read()})

    assert late(fence, {"r"}, set(), 99.9) == set()
    assert fence.take_late_blocks() == set()


@pytest.mark.parametrize("now", [100.0, 100.1, math.nan])
def test_a_read_that_does_not_certainly_complete_in_time_fails_with_its_blocks(now: float) -> None:
    fence = EndFence(FakeClocks())
    fence.started({"r": read(), "other": read(([7],), deadline=1e9)})

    assert late(fence, {"r", "other"}, set(), now) >= {"r"}
    assert fence.take_late_blocks() >= {1, 2}
    assert fence.take_late_blocks() == set()


def test_a_deadline_that_is_no_number_is_never_met() -> None:
    fence = EndFence(FakeClocks())
    fence.started({"r": read(deadline=math.nan)})

    assert late(fence, {"r"}, set(), 1.0) == {"r"}


def test_a_read_from_an_engine_with_an_unknown_clock_fails() -> None:
    fence = EndFence(FakeClocks(known=set()))
    fence.started({"r": read()})

    assert late(fence, {"r"}, set(), 1.0) == {"r"}


def test_a_read_is_judged_when_it_completes_and_only_then() -> None:
    fence = EndFence(FakeClocks())
    fence.started({"r": read()})

    assert late(fence, set(), set(), 200.0) == set()
    assert late(fence, {"r"}, set(), 99.0) == set()
    assert late(fence, {"r"}, set(), 200.0) == set()


def test_a_read_that_vllm_failed_already_is_left_to_vllm() -> None:
    fence = EndFence(FakeClocks())
    fence.started({"r": read()})

    assert late(fence, {"r"}, {"r"}, 200.0) == set()
    assert fence.take_late_blocks() == set()


@pytest.mark.parametrize(
    "meta",
    [
        pytest.param(read(deadline=None), id="a hand-off of vLLM's own connector"),
        pytest.param(read(()), id="a full local hit"),
        pytest.param(read(([],)), id="no blocks"),
        pytest.param(SimpleNamespace(remote=None, local_block_ids=([1],)), id="no remote"),
    ],
)
def test_what_has_no_deadline_or_reads_nothing_is_not_followed(meta: Any) -> None:
    clocks = FakeClocks()
    fence = EndFence(clocks)
    fence.started({"r": meta})

    assert late(fence, {"r"}, set(), 200.0) == set()
    assert clocks.watched == []


def test_the_clock_of_an_engine_is_watched_once_a_read_starts() -> None:
    clocks = FakeClocks()
    EndFence(clocks).started({"r": read()})

    assert clocks.watched == [("engine-d", "10.0.0.1", 5601)]


def test_with_several_cache_groups_the_request_is_named_and_no_blocks() -> None:
    fence = EndFence(FakeClocks())
    fence.started({"r": read(([1, 2], [1]))})

    assert late(fence, {"r"}, set(), 200.0) == {"r"}
    assert fence.take_late_blocks() == set()


def test_a_read_is_held_back_while_the_clock_of_its_engine_is_measured() -> None:
    clocks = FakeClocks(known=set(), asked={"engine-d"})
    fence = EndFence(clocks)
    fence.started({"r": read(), "other": read(deadline=None)})

    assert fence.judge({"r", "other"}, set(), 1.0) == ({"other"}, set())
    clocks.known, clocks.asked = {"engine-d"}, set()
    assert fence.judge(set(), set(), 2.0) == ({"r"}, set())
    assert fence.judge(set(), set(), 3.0) == (set(), set())


def test_a_read_that_was_held_back_too_long_for_its_deadline_fails() -> None:
    clocks = FakeClocks(known=set(), asked={"engine-d"})
    fence = EndFence(clocks)
    fence.started({"r": read(deadline=2.0)})

    assert fence.judge({"r"}, set(), 1.0) == (set(), set())
    clocks.known, clocks.asked = {"engine-d"}, set()
    assert fence.judge(set(), set(), 2.0) == ({"r"}, {"r"})
    assert fence.take_late_blocks() == {1, 2}


@pytest.mark.parametrize(
    ("asked", "now"), [(set(), 1.5), ({"engine-d"}, 1.0 + HOLD_S)], ids=["not measured", "too long"]
)
def test_a_read_whose_engines_clock_stays_unknown_fails(asked: set[str], now: float) -> None:
    clocks = FakeClocks(known=set(), asked={"engine-d"})
    fence = EndFence(clocks)
    fence.started({"r": read()})

    assert fence.judge({"r"}, set(), 1.0) == (set(), set())
    clocks.asked = asked
    assert fence.judge(set(), set(), now) == ({"r"}, {"r"})
