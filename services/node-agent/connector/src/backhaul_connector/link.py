"""The connection to the node agent: one thread, one Unix socket, never in the scheduler's way."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from backhaul_connector import wire
from backhaul_connector.ledger import Ledger

_log = logging.getLogger("vllm.backhaul.link")

_SILENCE_S = 10.0
"""An agent that says nothing for this long is dead: it pings about every second."""
_LOOK_S = 1.0
"""How often its silence is looked at."""
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_RECV_BYTES = 64 * 1024
_UNSENT_BYTES = 64 * 1024
"""No more messages are encoded while this much waits to be sent: meanwhile the interpreter is the engine's."""


class _Bell:
    """Wakes the link's thread: rung from any other, heard by that one."""

    def __init__(self) -> None:
        self.socket, self._ringer = socket.socketpair()
        self.socket.setblocking(False)
        self._ringer.setblocking(False)
        self._rung = False

    def ring(self) -> None:
        """Makes the socket readable, unless it is already: a system call each time would be most of a message's cost.

        Never blocks.
        """
        if self._rung:
            return
        self._rung = True
        # Closed: the engine is shutting down.
        with contextlib.suppress(OSError):
            self._ringer.send(b"\0")

    def hear(self) -> None:
        """Takes the ring away; what is looked at after that is all that was rung for."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)
        self._rung = False

    def close(self) -> None:
        self.socket.close()
        self._ringer.close()


class AgentLink:
    """Keeps a session with the agent for as long as the engine lives.

    ``hello`` makes the first message of each session; it gets the session of the agent that was connected last.
    """

    def __init__(self, path: str, ledger: Ledger, hello: Callable[[str], wire.Hello]) -> None:
        self._path = path
        self._ledger = ledger
        self._hello = hello
        self._session = ""
        self._answered = False
        """Whether an agent answered in the current attempt."""
        self._stopping = threading.Event()
        self._bell = _Bell()
        self._thread = threading.Thread(target=self._run, name="backhaul-link", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Tells the thread that there is something to send. Never blocks; safe from any thread."""
        self._bell.ring()

    def stop(self) -> None:
        """Ends the session and the thread, within about a second."""
        self._stopping.set()
        self.wake()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            answered_before, self._answered = self._answered, False
            problem = self._attempt()
            # An agent that hangs takes a connection, and its time, like one that is well.
            well = self._answered and time.monotonic() - started > _SILENCE_S
            attempt = 0 if well else attempt + 1
            lost = answered_before and not self._answered
            if (attempt == 1 or lost) and not self._stopping.is_set():
                _log.warning(
                    "Backhaul: no node agent answers at %s (%s); reuse is off until it does", self._path, problem
                )
            self._stopping.wait(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
        self._bell.close()

    def _attempt(self) -> str:
        overflowed = False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_SILENCE_S)
                sock.connect(self._path)
                sock.setblocking(False)
                _Session(sock, self._bell, self._ledger, self._welcomed).run(self._hello(self._session), self._stopping)
            return "stopped"
        except Exception as error:  # noqa: BLE001 - a thread's boundary: whatever it was, the next session starts anew
            overflowed = isinstance(error, BufferError)
            return f"{type(error).__name__}: {error}"
        finally:
            self._ledger.disconnect()
            if overflowed:
                _log.warning(
                    "Backhaul: the node agent reads too slowly; it is told all anew (%d dropped so far)",
                    self._ledger.dropped_count,
                )

    def _welcomed(self, session: str) -> None:
        self._session, self._answered = session, True
        _log.info("Backhaul: connected to the node agent at %s", self._path)


class _SessionError(Exception):
    """The other side broke the protocol or went away."""


class _Session:
    """One connection, from `Hello` to its end."""

    def __init__(self, sock: socket.socket, bell: _Bell, ledger: Ledger, welcomed: Callable[[str], None]) -> None:
        self._sock = sock
        self._bell = bell
        self._ledger = ledger
        self._welcomed = welcomed
        self._outgoing = bytearray()
        self._more = False
        """Whether there may be messages that are not encoded yet."""
        self._incoming = bytearray()
        self._replay: Iterator[wire.FromConnector] = iter(())
        self._heard = time.monotonic()

    def run(self, hello: wire.Hello, stopping: threading.Event) -> None:
        self._outgoing += wire.encode(hello)
        try:
            self._loop(stopping)
        finally:
            self._read_rest()

    def _loop(self, stopping: threading.Event) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell.socket, selectors.EVENT_READ)
            selector.register(self._sock, selectors.EVENT_READ)
            while not stopping.is_set():
                writes = self._outgoing or self._more
                interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
                selector.modify(self._sock, interest)
                for key, events in selector.select(timeout=_LOOK_S):
                    if key.fileobj is self._bell.socket:
                        self._bell.hear()
                    elif events & selectors.EVENT_READ:
                        self._receive()
                self._fill()
                self._send()
                if time.monotonic() - self._heard > _SILENCE_S:
                    raise _SessionError(f"silent for {_SILENCE_S:.0f} s")

    def _read_rest(self) -> None:
        # The agent grants a set once its `Claimed` is written. What was written before reading is shut down is still
        # there to be read, and a write after that fails at the agent: so no grant exists that this engine has not seen.
        try:
            self._sock.shutdown(socket.SHUT_RD)
            while True:
                self._receive()
        except (OSError, msgspec.DecodeError, _SessionError):
            pass

    def _receive(self) -> None:
        data = self._sock.recv(_RECV_BYTES)
        if not data:
            raise _SessionError("the agent closed the connection")
        self._heard = time.monotonic()
        self._incoming += data
        *lines, self._incoming = self._incoming.split(b"\n")
        if len(self._incoming) > wire.MAX_LINE_BYTES:
            raise _SessionError(f"a line of more than {wire.MAX_LINE_BYTES} bytes")
        for line in lines:
            self._handle(wire.decode_from_agent(bytes(line)))

    def _handle(self, message: wire.FromAgent) -> None:
        match message:
            case wire.Welcome(protocol=wire.PROTOCOL_VERSION, session=session):
                self._welcomed(session)
                self._replay = self._ledger.connect()
            case wire.Welcome(protocol=other):
                raise _SessionError(f"the agent speaks protocol {other}, this connector {wire.PROTOCOL_VERSION}")
            case wire.Ping(token=token):
                now = time.perf_counter()
                ledger = self._ledger
                pong = wire.Pong(
                    token=token, now=now, dropped_count=ledger.dropped_count, foreign_count=ledger.foreign_count
                )
                self._outgoing += wire.encode(pong)
            case wire.Claimed(set_id=set_id):
                self._ledger.mark(set_id, claimed=True)
            case wire.Returned(set_id=set_id):
                self._ledger.mark(set_id, claimed=False)

    def _fill(self) -> None:
        # Bit by bit: a long replay shall neither lie in memory encoded nor hold the interpreter while it is encoded.
        self._more = True
        while len(self._outgoing) < _UNSENT_BYTES:
            if (message := self._next()) is None:
                self._more = False
                return
            self._outgoing += wire.encode(message)

    def _next(self) -> wire.FromConnector | None:
        for message in self._replay:
            return message
        return self._ledger.take()

    def _send(self) -> None:
        if not self._outgoing:
            return
        try:
            sent = self._sock.send(self._outgoing)
        except BlockingIOError:
            return
        del self._outgoing[:sent]
