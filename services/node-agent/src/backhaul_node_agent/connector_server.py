"""The Unix socket on which the connectors of the engines beside this agent report.

One connection per engine; the newest wins. A connection that breaks the protocol, or whose connector does not answer
pings, is closed: the connector comes back and replays all.

The newest agent takes the socket's path, whether the one before it is dead or alive: who may grant is decided by the
node key in the registry and by whom the connector is connected to, never by the file. Connections of an older agent
that still lives stay with it until either side ends them, or its node has left the directory (`give_way`); while it
has not, it takes the path again when nobody has it any more.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import stat
from pathlib import Path

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import UnavailableError
from backhaul_common.metering import Counter
from backhaul_common.texts import clip
from backhaul_connector import wire
from backhaul_node_agent import convert, instruments
from backhaul_node_agent.core import bounds
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import EngineFacts

_log = structlog.get_logger(__name__)

_HELLO_S = 5.0
_PING_S = 1.0
_SILENCE_S = 5.0
"""A connector that answers no ping for this long is dead."""
_MESSAGES_PER_TURN = 64
"""A long replay lets claims through after so many messages."""
_MAX_UNANSWERED = 16
_MAX_SHOWN_BYTES = 128
"""Longest text of a connector in a log line."""


class ProtocolError(Exception):
    """The connector said something that it must not."""


class _Connection:
    """One connector, from its `Hello` on."""

    def __init__(self, number: int, facts: EngineFacts, last_session: str, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.facts = facts
        self.last_session = last_session
        self.writer = writer
        self.replayed_count = 0
        # Pings on their way, by the time they were sent; old ones fall out when a connector answers none.
        self.pings: dict[float, None] = {}
        self.heard_at = 0.0
        self.foreign_count = 0

    def write(self, message: wire.FromAgent) -> None:
        self.writer.write(wire.encode(message))

    def close(self) -> None:
        # Nothing that is still in the buffer matters to a connector that will replay.
        self.writer.transport.abort()


class ConnectorServer:
    """Listens for connectors and turns what they say into events."""

    def __init__(self, *, path: Path, session: str, clock: Clock) -> None:
        self._path = path
        self._session = session
        self._clock = clock
        self._numbers = itertools.count(1)
        self._connections: dict[str, _Connection] = {}
        self._sock: socket.socket | None = None
        self._inode = 0
        self._complaint = ""
        self._gives_way = False
        # Per rank, what its engine had dropped when it last said so: a full queue ends the connection that overflowed.
        self._dropped: dict[int, tuple[str, int]] = {}
        self._drops = Counter(instruments.CONNECTOR_DROPS)

    def open(self) -> None:
        """Takes the path; connectors that come wait until `run`.

        Raises UnavailableError (SOCKET_UNAVAILABLE) when the socket cannot be made.
        """
        self._sock, self._inode = _listen(self._path)
        _log.info("listening for connectors", path=str(self._path))

    def close(self) -> None:
        """Removes the socket, unless another agent has taken the path."""
        if self._sock is not None:
            self._sock.close()
            if _inode(self._path) == self._inode:
                self._path.unlink(missing_ok=True)

    async def run(self, hear: ev.Hear) -> None:
        """Serves until cancelled, which closes all connections."""
        assert self._sock is not None
        async with asyncio.TaskGroup() as group:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                group.create_task(self._serve(reader, writer, hear))

            while True:
                server = await asyncio.start_unix_server(accept, sock=self._sock, limit=wire.MAX_LINE_BYTES)
                try:
                    await self._retake_path()
                finally:
                    # Connections that it accepted go on.
                    server.close()

    @property
    def foreign_count(self) -> int:
        """Leases of the connected engines that are no reported set's."""
        return sum(connection.foreign_count for connection in self._connections.values())

    def tell(self, engine_id: str, message: wire.Claimed | wire.Returned) -> None:
        """Writes a message to the engine's connector, if it is connected."""
        connection = self._connections.get(engine_id)
        if connection is not None:
            connection.write(message)

    async def flushed(self, engine_id: str, timeout_s: float) -> bool:
        """Waits until everything written to the engine's connector is in its socket.

        Returns False when that takes longer than `timeout_s`, or the connection is gone or another one by then.
        """
        connection = self._connections.get(engine_id)
        if connection is None:
            return False
        if not connection.writer.transport.get_write_buffer_size():
            # As it is nearly always: a socket with room takes what is written at once.
            return not connection.writer.is_closing()
        try:
            async with asyncio.timeout(timeout_s):
                await connection.writer.drain()
        except (OSError, TimeoutError):
            return False
        return self._connections.get(engine_id) is connection and not connection.writer.is_closing()

    def drop_connections(self) -> None:
        """Closes all connections; their connectors go to whoever listens on the path now."""
        for connection in self._connections.values():
            connection.close()

    def give_way(self) -> None:
        """Leaves the path, and all connectors, to the next agent that takes it: this one has nothing to grant any more.

        Until one does, what is connected stays.
        """
        self._gives_way = True

    async def _retake_path(self) -> None:
        """Waits until nobody has the path and takes it: something removed the socket, or its newer owner has ended."""
        told = ""
        while True:
            await self._clock.sleep(_SILENCE_S)
            inode = _inode(self._path)
            if inode == self._inode:
                continue
            if self._gives_way:
                if inode:
                    self.drop_connections()
                continue
            problem = "another agent has taken it"
            if not inode:
                try:
                    self._sock, self._inode = _listen(self._path)
                except UnavailableError as error:
                    problem = error.message
                else:
                    _log.warning("connector socket was gone, listening again", path=str(self._path))
                    return
            if problem != told:
                _log.warning("connectors cannot reach this agent", path=str(self._path), problem=problem)
            told = problem

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hear: ev.Hear) -> None:
        # A claim waits until its notice is in the socket: nothing may linger in the buffer unnoticed.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            hello = await self._greet(reader, writer)
            facts = convert.engine_facts(hello)
            connection = _Connection(next(self._numbers), facts, hello.last_session, writer)
            await self._attend(connection, reader, hear)
        except* (ValueError, ProtocolError) as group:
            self._complain(_causes(group))
        except* (OSError, EOFError, TimeoutError) as group:
            _log.info("connector connection ended", reason=_causes(group))
        except* Exception as group:  # noqa: BLE001  # one engine's connection must not end the agent
            _log.error("connector connection failed", exc_info=group)
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _complain(self, problem: str) -> None:
        # The connector comes back within seconds, and may say the same again.
        level = logging.DEBUG if problem == self._complaint else logging.WARNING
        _log.log(level, "connector broke the protocol, connection ended", problem=problem)
        self._complaint = problem

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> wire.Hello:
        async with asyncio.timeout(_HELLO_S):
            hello = wire.decode_from_connector(await _line(reader))
        if not isinstance(hello, wire.Hello):
            raise ProtocolError("the first message must be hello")
        if hello.protocol != wire.PROTOCOL_VERSION:
            # The connector says the same in the engine's log when it sees our version.
            writer.write(wire.encode(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session=self._session)))
            raise ProtocolError(
                f"the connector of engine {clip(hello.engine_id, _MAX_SHOWN_BYTES)} speaks protocol {hello.protocol}, "
                f"this agent {wire.PROTOCOL_VERSION}: install the same Backhaul version on both sides"
            )
        return hello

    async def _attend(self, connection: _Connection, reader: asyncio.StreamReader, hear: ev.Hear) -> None:
        facts = connection.facts
        engine_id = facts.engine_id
        older = self._connections.pop(engine_id, None)
        if older is not None:
            older.close()
        self._connections[engine_id] = connection
        hear(ev.EngineConnected(connection.number, facts, connection.last_session))
        _log.info("connector connected", engine=engine_id, rank=facts.rank, version=facts.connector_version)
        try:
            connection.write(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session=self._session))
            connection.heard_at = self._clock.monotonic()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ping(connection))
                group.create_task(self._listen_to(connection, reader, hear))
        finally:
            if self._connections.get(engine_id) is connection:
                del self._connections[engine_id]
            hear(ev.ConnectorLost(connection.number, engine_id))

    async def _ping(self, connection: _Connection) -> None:
        while True:
            now = self._clock.monotonic()
            if now - connection.heard_at > _SILENCE_S:
                raise ProtocolError(f"no answer to pings for {_SILENCE_S:.0f} s")
            if len(connection.pings) >= _MAX_UNANSWERED:
                del connection.pings[next(iter(connection.pings))]
            connection.pings[now] = None
            connection.write(wire.Ping(token=now))
            await self._clock.sleep(_PING_S)

    async def _listen_to(self, connection: _Connection, reader: asyncio.StreamReader, hear: ev.Hear) -> None:
        for count in itertools.count(1):
            message = wire.decode_from_connector(await _line(reader))
            self._handle(connection, message, hear)
            if count % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _handle(self, connection: _Connection, message: wire.FromConnector, hear: ev.Hear) -> None:
        number, engine_id = connection.number, connection.facts.engine_id
        match message:
            case wire.Hello():
                raise ProtocolError("hello came twice")
            case wire.Identity():
                bounds.check_text(message.weights_digest, "weights_digest")
                hear(ev.WeightsKnown(number, engine_id, message.weights_digest, message.problem))
            case wire.Retained():
                connection.replayed_count += message.replayed
                self._hear_retained(connection, message, hear)
            case wire.Replayed():
                if message.set_count != connection.replayed_count:
                    raise ProtocolError(
                        f"{connection.replayed_count} of {message.set_count} sets arrived in the replay"
                    )
                hear(ev.ReplayFinished(number, engine_id))
            case wire.Freed():
                hear(ev.SetsFreed(number, engine_id, message.set_ids))
            case wire.Deadlines():
                for deadline in message.deadlines.values():
                    bounds.check_instant(deadline, "deadline")
                hear(ev.DeadlinesConfirmed(number, engine_id, message.deadlines))
            case wire.Memory():
                bounds.check_count(message.free_count, "free_count")
                bounds.check_count(message.waiting_count, "waiting_count")
                hear(ev.MemorySeen(number, engine_id, message.free_count, message.waiting_count))
            case wire.Pong():
                self._hear_pong(connection, message, hear)

    def _hear_retained(self, connection: _Connection, message: wire.Retained, hear: ev.Hear) -> None:
        report = message.set
        try:
            block_set = convert.block_set(report)
        except ValueError as error:
            # It expires by itself.
            _log.warning(
                "reported block set not taken over", set_id=clip(report.set_id, _MAX_SHOWN_BYTES), problem=str(error)
            )
            return
        hear(
            ev.Reported(
                connection.number,
                connection.facts.engine_id,
                block_set,
                report.deadline,
                granted=report.claimed,
                replayed=message.replayed,
            )
        )

    def _hear_pong(self, connection: _Connection, pong: wire.Pong, hear: ev.Hear) -> None:
        if pong.token not in connection.pings:
            raise ProtocolError("an answer to a ping that was not sent")
        bounds.check_instant(pong.now, "now")
        bounds.check_count(pong.dropped_count, "dropped_count", most=2**63 - 1)
        bounds.check_count(pong.foreign_count, "foreign_count")
        connection.foreign_count = pong.foreign_count
        del connection.pings[pong.token]
        now = self._clock.monotonic()
        connection.heard_at = now
        self._note_dropped(connection.facts, pong.dropped_count)
        hear(
            ev.ClockObserved(
                connection.number,
                connection.facts.engine_id,
                sent=pong.token,
                engine_now=pong.now,
                received=now,
            )
        )

    def _note_dropped(self, facts: EngineFacts, count: int) -> None:
        engine_id, before = self._dropped.get(facts.rank, ("", 0))
        if engine_id == facts.engine_id and count > before:
            self._drops.add(count - before)
            _log.warning("connector dropped messages", engine=engine_id, count=count - before)
        self._dropped[facts.rank] = (facts.engine_id, count)


def _causes(group: BaseExceptionGroup[BaseException]) -> str:
    causes = (_causes(e) if isinstance(e, BaseExceptionGroup) else str(e) or type(e).__name__ for e in group.exceptions)
    return "; ".join(causes)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Reads one line. Raises EOFError at the end, ValueError for a line over the limit."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connector closed the connection")
    return line


def _listen(path: Path) -> tuple[socket.socket, int]:
    """Returns a listening socket that took the path over, and its inode."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(f"{path} is not a socket")
        fresh.unlink(missing_ok=True)
        sock.bind(str(fresh))
        fresh.chmod(0o600)
        sock.listen(16)
        # At the path there may be another agent's in the next moment.
        inode = fresh.stat().st_ino
        # Bound elsewhere and moved: nobody sees it with another mode or before it listens.
        fresh.rename(path)
    except OSError as error:
        sock.close()
        fresh.unlink(missing_ok=True)
        raise UnavailableError("SOCKET_UNAVAILABLE", f"cannot listen on {path}: {error}") from error
    sock.setblocking(False)
    return sock, inode


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
