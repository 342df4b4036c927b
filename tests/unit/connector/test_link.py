"""The link keeps a session with the agent through all that can happen to either, on a real socket."""

import itertools
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from backhaul_connector import link as link_module
from backhaul_connector import wire
from backhaul_connector.ledger import Ledger
from backhaul_connector.link import AgentLink, _Bell, _Session
from tests.fakes.block_sets import report
from tests.fakes.connector_agent import FakeAgent
from tests.fakes.eventually import eventually
from tests.unit.connector.test_wire import HELLO

Hello = Callable[[str], wire.Hello]


def hello(last_session: str) -> wire.Hello:
    return msgspec.structs.replace(HELLO, last_session=last_session)


@pytest.fixture(autouse=True)
def _fast_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_BACKOFF_S", (0.01,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@contextmanager
def linked(path: Path, ledger: Ledger | None = None, hello: Hello = hello) -> Iterator[tuple[AgentLink, Ledger]]:
    """Runs a link, of which the ledger wakes it."""
    ledger = ledger or Ledger()
    link = AgentLink(str(path), ledger, hello)
    ledger._wake = link.wake
    link.start()
    try:
        yield link, ledger
    finally:
        link.stop()
        assert not link._thread.is_alive()


def retain_large(ledger: Ledger, count: int) -> None:
    """Retains sets ``set-0`` and on, whose reports fill a socket soon."""
    made = report("large", remote_block_ids=[[*range(10_000)]])
    for number in range(count):
        ledger.retained(msgspec.structs.replace(made, set_id=f"set-{number}"))


class GatedLedger(Ledger):
    """Holds the link's thread in `connect` until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()

    def connect(self) -> Iterator[wire.FromConnector]:
        self.entered.set()
        assert self.gate.wait(5)
        return super().connect()


def test_a_session_is_hello_then_replay_then_what_happens(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path) as (_, ledger):
        ledger.retained(report("old"))
        connection, said, replay = agent.welcome()
        ledger.retained(report("new"))
        ledger.deadlines({"new": 900.0})
        ledger.freed(["old"])

        assert said == HELLO
        assert replay == [wire.Retained(set=report("old"), replayed=True), wire.Replayed(set_count=1)]
        assert [connection.receive() for _ in range(3)] == [
            wire.Retained(set=report("new")),
            wire.Deadlines(deadlines={"new": 900.0}),
            wire.Freed(set_ids=["old"]),
        ]


def test_nothing_follows_the_hello_before_the_welcome(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path) as (_, ledger):
        connection = agent.accept()
        connection.receive()
        ledger.retained(report("a"))
        connection.send(wire.Ping(token=1.0))

        assert isinstance(connection.receive(), wire.Pong)


def test_a_ping_is_answered_with_the_engines_clock_and_what_was_dropped(path: Path) -> None:
    ledger = Ledger()
    ledger.retained(report("a"))
    with FakeAgent(path) as agent, linked(path, ledger):
        connection, _, _ = agent.welcome()
        before = time.perf_counter()
        connection.send(wire.Ping(token=7.5))
        pong = connection.receive()

    assert isinstance(pong, wire.Pong)
    assert (pong.token, pong.dropped_count) == (7.5, 1)
    assert before <= pong.now <= time.perf_counter()


def test_messages_may_arrive_in_any_pieces(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path):
        connection, _, _ = agent.welcome()
        line = wire.encode(wire.Ping(token=1.0))
        for start in range(0, len(line), 5):
            connection.send_raw(line[start : start + 5])
        assert isinstance(connection.receive(), wire.Pong)

        connection.send_raw(line * 3 + line[:7])
        connection.send_raw(line[7:])
        assert [type(connection.receive()) for _ in range(4)] == [wire.Pong] * 4


def test_a_long_replay_delays_no_pong_and_is_encoded_bit_by_bit(path: Path) -> None:
    ledger = Ledger()
    retain_large(ledger, 400)
    with FakeAgent(path) as agent, linked(path, ledger):
        connection = agent.accept()
        connection.receive()
        connection.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session="s"))
        first = connection.receive()
        connection.send(wire.Ping(token=1.0))
        before = connection.receive_until(lambda message: isinstance(message, wire.Pong))
        after = connection.receive_until(lambda message: isinstance(message, wire.Replayed))

    assert len(before) < 50
    replayed = [message.set.set_id for message in [first, *before, *after] if isinstance(message, wire.Retained)]
    assert replayed == [f"set-{number}" for number in range(400)]


def test_what_happens_during_a_replay_comes_after_it(path: Path) -> None:
    ledger = Ledger()
    retain_large(ledger, 50)
    with FakeAgent(path) as agent, linked(path, ledger):
        connection = agent.accept()
        connection.receive()
        connection.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session="s"))
        first = connection.receive()
        ledger.freed(["set-0", "set-49"])
        replay = [first, *connection.receive_until(lambda message: isinstance(message, wire.Replayed))]

        assert len(replay) == 51
        assert connection.receive() == wire.Freed(set_ids=["set-0", "set-49"])


async def test_grants_are_marked_and_unmarked(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path) as (_, ledger):
        ledger.retained(report("a"))
        ledger.retained(report("b"))
        connection, _, _ = agent.welcome()
        connection.send(wire.Claimed(set_id="a"), wire.Claimed(set_id="b"), wire.Returned(set_id="b"))
        connection.send(wire.Claimed(set_id="foreign"))
        connection.close()
        _, _, replay = agent.welcome()

    claimed = {message.set.set_id: message.set.claimed for message in replay if isinstance(message, wire.Retained)}
    assert claimed == {"a": True, "b": False}


def test_a_grant_written_just_before_the_agent_dies_is_seen(path: Path) -> None:
    ledger = GatedLedger()
    ledger.retained(report("a"))
    with FakeAgent(path) as agent, linked(path, ledger):
        dying = agent.accept()
        dying.receive()
        dying.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session="s"))
        assert ledger.entered.wait(5)
        dying.send(wire.Claimed(set_id="a"))
        dying.close()
        ledger.gate.set()
        _, _, replay = agent.welcome()

    assert replay == [
        wire.Retained(set=msgspec.structs.replace(report("a"), claimed=True), replayed=True),
        wire.Replayed(set_count=1),
    ]


class LastMoment(socket.socket):
    """A socket whose peer writes a grant at the moment when there seems to be nothing left to read."""

    def __init__(self, mine: socket.socket, peer: socket.socket) -> None:
        super().__init__(fileno=mine.detach())
        self._peer = peer
        self.accepted: bool | None = None

    def recv(self, size: int, flags: int = 0) -> bytes:
        try:
            data = super().recv(size, flags)
        except BlockingIOError:
            data = b""
        if not data and self.accepted is None:
            try:
                self.accepted = bool(self._peer.send(wire.encode(wire.Claimed(set_id="a"))))
            except BrokenPipeError:
                self.accepted = False
        return data or super().recv(size, flags)


@pytest.mark.parametrize("problem", [b"garbage\n", b'{"type":"welcome","protocol":99,"session":"s"}\n'])
def test_no_grant_is_written_that_a_session_did_not_see_before_its_end(problem: bytes) -> None:
    ledger = Ledger()
    ledger.retained(report("a"))
    mine, peer = socket.socketpair()
    mine.setblocking(False)
    with closing(_Bell()) as bell, peer, LastMoment(mine, peer) as sock:
        peer.send(problem)
        with pytest.raises(Exception, match=r"malformed|protocol 99"):
            _Session(sock, bell, ledger, lambda session: None).run(HELLO, threading.Event())

        assert sock.accepted is False


def test_the_next_session_names_the_last_one(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path):
        for expected, session in itertools.pairwise(["", "one", "two", "three"]):
            connection, said, _ = agent.welcome(session)
            assert said.last_session == expected
            connection.close()


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(b"", id="the agent closes"),
        pytest.param(b'{"type":"clai', id="the agent closes in the middle of a line"),
        pytest.param(b"garbage\n", id="no message"),
        pytest.param(b"\n", id="an empty line"),
        pytest.param(b'{"type":"ping","token":1,"x":' + b"[" * 50_000 + b"\n", id="nested too deeply"),
        pytest.param(b'{"type":"welcome","protocol":99,"session":"s"}\n', id="another protocol"),
        pytest.param(b"x" * 2000, id="a line that is too long"),
    ],
)
@pytest.mark.parametrize("welcomed", [False, True])
def test_after_a_broken_session_comes_a_new_one(
    path: Path, problem: bytes, welcomed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 1000)
    with FakeAgent(path) as agent, linked(path) as (_, ledger):
        ledger.retained(report("a"))
        connection = agent.welcome()[0] if welcomed else agent.accept()
        connection.send_raw(problem)
        if problem.endswith(b"\n") or len(problem) > 1000:
            connection.read_to_end()
        connection.close()

        _, _, replay = agent.welcome()
        assert [type(message) for message in replay] == [wire.Retained, wire.Replayed]


def test_an_agent_that_reads_too_slowly_gets_a_new_replay_and_the_engine_never_waits(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(max_queued=5)
    with FakeAgent(path) as agent, linked(path, ledger):
        slow, _, _ = agent.welcome()
        retain_large(ledger, 30)
        slow.read_to_end()
        _, _, replay = agent.welcome()

    assert replay[-1] == wire.Replayed(set_count=30)
    assert ledger.dropped_count > 0
    told = re.search(r"told all anew \((\d+) dropped so far\)", caplog.text)
    assert told is not None
    assert 0 < int(told[1]) <= ledger.dropped_count


def test_a_silent_agent_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_SILENCE_S", 0.05)
    monkeypatch.setattr(link_module, "_LOOK_S", 0.05)
    with FakeAgent(path) as agent, linked(path):
        connection, _, _ = agent.welcome()
        connection.read_to_end()
        assert agent.welcome()[1] == hello("session")


def test_an_agent_that_hangs_is_said_to_once_and_again_when_it_answers(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "_SILENCE_S", 0.5)
    monkeypatch.setattr(link_module, "_LOOK_S", 0.05)
    caplog.set_level(logging.INFO, "vllm.backhaul.link")
    with FakeAgent(path) as agent, linked(path):
        for _ in range(2):
            agent.accept().read_to_end()
            agent.accept().read_to_end()
            agent.welcome()

    said = [record.getMessage().split(" at ")[0] for record in caplog.records]
    assert said[:4] == ["Backhaul: no node agent answers", "Backhaul: connected to the node agent"] * 2


async def test_an_agent_that_comes_later_is_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with linked(path) as (_, ledger):
        await eventually(lambda: "no node agent" in caplog.text)
        ledger.retained(report("a"))
        with FakeAgent(path) as agent:
            assert len(agent.welcome()[2]) == 2


def test_a_hello_that_cannot_be_made_yet_does_not_end_the_thread(path: Path) -> None:
    problems = [ValueError("not ready"), RuntimeError("not ready")]

    def unready(last_session: str) -> wire.Hello:
        if problems:
            raise problems.pop()
        return hello(last_session)

    with FakeAgent(path) as agent, linked(path, hello=unready):
        agent.accept()
        agent.accept()
        assert agent.welcome()[1] == HELLO


def test_a_set_that_cannot_be_encoded_does_not_end_the_thread(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path) as (_, ledger):
        agent.welcome()
        ledger.retained(report("a", remote_host="\ud800"))
        connection = agent.accept()
        connection.receive()
        ledger.freed(["a"])
        connection.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session="s"))

        assert connection.receive() == wire.Replayed(set_count=0)


async def test_nothing_is_queued_once_the_agent_has_gone(path: Path) -> None:
    with linked(path) as (_, ledger):
        with FakeAgent(path) as agent:
            agent.welcome()

        def dropped() -> bool:
            ledger.retained(report("a"))
            return ledger.dropped_count > 0

        await eventually(dropped)


def test_wakes_without_end_do_not_block(path: Path) -> None:
    link = AgentLink(str(path), Ledger(), hello)
    for _ in range(100_000):
        link.wake()
    link.start()
    link.stop()


def test_a_bell_is_rung_once_until_it_is_heard() -> None:
    with closing(_Bell()) as bell:
        for _ in range(2):
            for _ in range(3):
                bell.ring()
            assert bell.socket.recv(100, socket.MSG_PEEK) == b"\0"
            bell.hear()
            with pytest.raises(BlockingIOError):
                bell.socket.recv(100)
        bell.hear()


def test_an_engine_that_ends_rings_no_bell() -> None:
    bell = _Bell()
    bell.close()
    bell.ring()


def test_what_happens_while_the_thread_looks_is_sent_all_the_same(path: Path) -> None:
    with FakeAgent(path) as agent, linked(path) as (_, ledger):
        connection, _, _ = agent.welcome()
        for number in range(300):
            ledger.retained(msgspec.structs.replace(report("a"), set_id=f"set-{number}"))
        sent = [connection.receive() for _ in range(300)]

    assert [message.set.set_id for message in sent if isinstance(message, wire.Retained)] == [
        f"set-{number}" for number in range(300)
    ]


def test_a_link_stops_in_the_middle_of_a_session(path: Path) -> None:
    with FakeAgent(path) as agent:
        with linked(path):
            connection, _, _ = agent.welcome()
        connection.read_to_end()
