"""Clocks of other engines: what is certain of them, and what is not."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_connector import clocks as clocks_module
from backhaul_connector.clocks import Offset, RemoteClocks, measure_offset
from tests.fakes.eventually import eventually
from tests.fakes.side_channel import FakeSideChannel, handshake_payload

NEVER_S = 3600.0
AT_ONCE_S = 0.001


class Engines:
    """Answers measurements as each engine was told to, the last answer again and again; notes who was asked."""

    def __init__(self, **answers: list[Offset | None]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def measure(self, host: str, port: int, engine_id: str) -> Offset | None:
        self.asked.append(engine_id)
        answers = self._answers[engine_id]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def running(measure: Callable[[str, int, str], Offset | None], remeasure_s: float = NEVER_S) -> Iterator[RemoteClocks]:
    clocks = RemoteClocks(measure, remeasure_s)
    try:
        yield clocks
    finally:
        clocks.stop()


def known(clocks: RemoteClocks, engine_id: str) -> bool:
    return clocks.remaining(engine_id, 0.0, 0.0) is not None


def offset(seconds: float, at: float = 0.0) -> Offset:
    return Offset(seconds - 0.001, seconds + 0.001, at)


@pytest.mark.parametrize(
    ("later", "jumped"),
    [
        pytest.param(Offset(10.0, 10.1, 1.0), False, id="the same"),
        pytest.param(Offset(10.1, 10.2, 1.0), False, id="touching"),
        pytest.param(Offset(10.107, 10.2, 1.0), True, id="just above"),
        pytest.param(Offset(9.8, 9.993, 1.0), True, id="just below"),
        pytest.param(Offset(9.0, 11.0, 1.0), False, id="measured badly"),
        pytest.param(Offset(11.0, 11.1, 1000.0), False, id="drift of a long time"),
        pytest.param(Offset(12.0, 12.1, 1000.0), True, id="more than drift"),
    ],
)
def test_an_offset_excludes_what_drift_cannot_explain(later: Offset, jumped: bool) -> None:
    assert Offset(10.0, 10.1, 0.0).excludes(later) is jumped


@given(age=st.floats(0, 1e5), rate=st.floats(-0.001, 0.001))
def test_widened_bounds_hold_however_the_clocks_drift(age: float, rate: float) -> None:
    widened = Offset(10.0, 10.1, 50.0).widened(50.0 + age)

    assert widened.low <= 10.0 + rate * age
    assert widened.high >= 10.1 + rate * age


async def test_nothing_is_known_of_a_clock_before_it_is_measured() -> None:
    go = threading.Event()

    def measure(host: str, port: int, engine_id: str) -> Offset:
        assert (host, port, engine_id) == ("host", 5601, "d")
        assert go.wait(5)
        return offset(1000.0)

    with running(measure) as clocks:
        assert not known(clocks, "d")
        assert not clocks.measuring("d")
        clocks.watch("d", "host", 5601)
        assert not known(clocks, "d")
        assert clocks.measuring("d")
        go.set()
        await eventually(lambda: known(clocks, "d"))
        assert not clocks.measuring("d")
        assert not known(clocks, "other")


async def test_a_clock_that_does_not_answer_is_not_being_measured_any_more() -> None:
    with running(Engines(d=[None]).measure) as clocks:
        clocks.watch("d", "host", 5601)
        await eventually(lambda: not clocks.measuring("d"))


async def test_what_remains_is_what_remains_at_worst() -> None:
    with running(Engines(d=[Offset(999.0, 1001.0, 5.0)]).measure) as clocks:
        clocks.watch("d", "host", 1)
        await eventually(lambda: known(clocks, "d"))

        # The engine's clock reads at most 1010 + 1001 + 0.005 + 0.001 * 1005 here.
        assert clocks.remaining("d", 2100.0, 1010.0) == pytest.approx(2100.0 - 2012.01)


async def test_a_clock_that_jumped_stays_jumped() -> None:
    engines = Engines(d=[offset(10.0), offset(70.0), offset(70.0)], other=[offset(0.0)])
    with running(engines.measure, AT_ONCE_S) as clocks:
        clocks.watch("d", "host", 1)
        clocks.watch("other", "host", 2)
        await eventually(lambda: clocks.jumped("d"))
        await eventually(lambda: engines.asked.count("d") > 5)

        assert clocks.jumped("d")
        assert not known(clocks, "d")
        assert not clocks.jumped("other")
        assert not clocks.jumped("never seen")


async def test_a_jumped_clock_is_not_forgotten_when_it_stops_answering() -> None:
    engines = Engines(d=[offset(10.0), offset(70.0), None])
    with running(engines.measure, AT_ONCE_S) as clocks:
        clocks.watch("d", "host", 1)
        await eventually(lambda: engines.asked.count("d") > 8)

        assert clocks.jumped("d")


async def test_an_engine_is_asked_once_however_often_it_is_named() -> None:
    engines = Engines(d=[offset(0.0)], last=[offset(0.0)])
    with running(engines.measure) as clocks:
        for _ in range(5):
            clocks.watch("d", "host", 1)
        clocks.watch("last", "host", 2)
        await eventually(lambda: known(clocks, "last"))

    assert engines.asked == ["d", "last"]


async def test_an_engine_that_did_not_answer_is_asked_again_when_it_is_named_again() -> None:
    engines = Engines(d=[None, offset(0.0)])
    with running(engines.measure) as clocks:

        def named_and_known() -> bool:
            clocks.watch("d", "host", 1)
            return known(clocks, "d")

        await eventually(named_and_known)

    assert engines.asked == ["d", "d"]


async def test_an_engine_that_misses_one_answer_is_still_known() -> None:
    engines = Engines(d=[offset(0.0), None, None, offset(0.0), None, None, offset(0.0)])
    with running(engines.measure, AT_ONCE_S) as clocks:
        clocks.watch("d", "host", 1)
        await eventually(lambda: len(engines.asked) > 8)

        assert known(clocks, "d")


async def test_an_engine_that_has_gone_is_forgotten_and_asked_no_more() -> None:
    engines = Engines(gone=[offset(0.0), None], d=[offset(0.0)])
    with running(engines.measure, AT_ONCE_S) as clocks:
        clocks.watch("gone", "host", 1)
        clocks.watch("d", "host", 2)
        await eventually(lambda: engines.asked.count("d") > 10)

        assert engines.asked.count("gone") == 4
        assert not known(clocks, "gone")
        assert known(clocks, "d")


async def test_an_engine_that_a_request_waits_for_goes_before_those_that_are_measured_again() -> None:
    asked: list[str] = []
    second_round, go = threading.Event(), threading.Event()

    def measure(host: str, port: int, engine_id: str) -> Offset:
        asked.append(engine_id)
        if asked.count("a") == 2 and not second_round.is_set():
            second_round.set()
            assert go.wait(5)
        return offset(0.0)

    with running(measure, 0.05) as clocks:
        for name in "abc":
            clocks.watch(name, "host", 1)
        await eventually(second_round.is_set)
        clocks.watch("new", "host", 1)
        go.set()
        await eventually(lambda: "new" in asked)

    before = asked.index("new")
    assert asked[before - 1] == "a"
    assert asked.count("a") == 2


async def test_the_oldest_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks_module, "_MAX_CLOCKS", 2)
    with running(lambda *_: offset(0.0)) as clocks:
        for name in "abc":
            clocks.watch(name, "host", 1)
            await eventually(partial(known, clocks, name))

        assert [known(clocks, name) for name in "abc"] == [False, True, True]


def test_clocks_that_watch_nothing_have_nothing_to_stop() -> None:
    RemoteClocks().stop()


def test_stopping_does_not_wait_for_a_round_to_end() -> None:
    asked: list[str] = []
    round_began, stopping = threading.Event(), threading.Event()

    def measure(host: str, port: int, engine_id: str) -> Offset:
        asked.append(engine_id)
        if len(asked) == 101:
            round_began.set()
            assert stopping.wait(5)
        return offset(0.0)

    with running(measure, 0.2) as clocks:
        for number in range(100):
            clocks.watch(f"engine-{number}", "host", 1)
        assert round_began.wait(5)
        clocks._wanted.put(None)
        stopping.set()

    assert len(asked) == 101


@pytest.mark.parametrize("seconds", [0.0, 12345.5, -50.0])
def test_the_offset_of_an_engine_is_between_its_bounds(seconds: float) -> None:
    with FakeSideChannel("d", clock_offset_s=seconds) as channel:
        measured = measure_offset("127.0.0.1", channel.port, "d")

    assert measured is not None
    assert measured.low <= seconds <= measured.high
    assert channel.asked == [[b"get_meta_msg", 0, 0]]


def test_another_engine_at_the_same_port_is_not_taken_for_it() -> None:
    with FakeSideChannel("d-restarted") as channel:
        assert measure_offset("127.0.0.1", channel.port, "d") is None


CLOCK = msgspec.msgpack.encode(5.0)


def test_an_engine_that_sends_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks_module, "_MAX_REPLY_BYTES", 1_000)
    monkeypatch.setattr(clocks_module, "_TIMEOUT_MS", 300)
    with FakeSideChannel("d") as channel:
        channel.parts = [handshake_payload("d", agent_metadata=bytes(2_000)), CLOCK]
        assert measure_offset("127.0.0.1", channel.port, "d") is None


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([handshake_payload("d")], id="no clock"),
        pytest.param([handshake_payload("d"), CLOCK, CLOCK], id="a part too many"),
        pytest.param([handshake_payload("d"), msgspec.msgpack.encode("noon")], id="a clock that is no number"),
        pytest.param([handshake_payload("d"), msgspec.msgpack.encode(math.nan)], id="a clock that shows no time"),
        pytest.param([b"\x91" * 20_000 + b"\xc0", CLOCK], id="nested too deeply"),
        pytest.param([handshake_payload("d"), b"\x91" * 20_000 + b"\xc0"], id="a clock nested too deeply"),
        pytest.param([b"", CLOCK], id="nothing"),
        pytest.param([b"\xc1", CLOCK], id="no msgpack"),
        pytest.param([msgspec.msgpack.encode([1]), CLOCK], id="a payload of another shape"),
        pytest.param([msgspec.msgpack.encode({}), CLOCK], id="no metadata"),
        pytest.param([msgspec.msgpack.encode({"agent_metadata_bytes": 5}), CLOCK], id="metadata that are no bytes"),
        pytest.param(
            [msgspec.msgpack.encode({"agent_metadata_bytes": msgspec.msgpack.encode([1])}), CLOCK],
            id="metadata of another shape",
        ),
        pytest.param(
            [msgspec.msgpack.encode({"agent_metadata_bytes": msgspec.msgpack.encode({})}), CLOCK], id="no engine id"
        ),
    ],
)
def test_an_answer_that_cannot_be_read_is_none(parts: list[bytes]) -> None:
    with FakeSideChannel("d") as channel:
        channel.parts = parts
        assert measure_offset("127.0.0.1", channel.port, "d") is None


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 1), ("127.0.0.1", -5), ("127.0.0.1", 10**9), ("\ud800", 1), ("", 1), ("a b", 1)]
)
def test_an_engine_that_cannot_be_reached_is_none(host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks_module, "_TIMEOUT_MS", 50)

    assert measure_offset(host, port, "d") is None


async def test_real_measurements_reach_the_clocks() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(FakeSideChannel("d", clock_offset_s=100.0))
        clocks = stack.enter_context(running(measure_offset))
        clocks.watch("d", "127.0.0.1", channel.port)
        await eventually(lambda: known(clocks, "d"))

        remaining = clocks.remaining("d", 200.0, time.perf_counter())

    assert remaining is not None
