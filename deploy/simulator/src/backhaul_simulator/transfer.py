"""Reads of a remote engine's blocks over TCP, block by block.

A read copies whatever is in the holder's memory when each block's turn comes; the holder checks nothing but that the
block exists. As with NIXL, a read can only reach the process that it was set up with: a connection names the engine
that it means, and another engine on the same port closes it.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from backhaul_simulator.pool import BlockPool

Kind = Literal["claimed", "handoff"]
"""A prefill engine reads what a decode engine retains, or a decode engine reads what a prefill engine hands off."""

_HEADER_BYTES = 4


class ReadRequest(msgspec.Struct, frozen=True):
    """What a reader asks of a holder."""

    read_id: int
    set_id: str
    """Request id on the holder whose blocks these are said to be."""
    reader: str
    """The reading request, and its engine."""
    kind: Kind
    pause_s: float
    """Before each block."""
    block_ids: list[int]


class _Part(msgspec.Struct, frozen=True):
    read_id: int
    first: int
    """Place of the first of these blocks in the read."""
    content: bytes
    """Of one block or more; empty: the read has failed."""


class Watcher(Protocol):
    """What is told of reads at the holder."""

    def read_started(self, read: ReadRequest) -> None: ...

    def block_copied(self, read: ReadRequest, block_id: int) -> None: ...


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(ReadRequest).decode
_decode_part = msgspec.msgpack.Decoder(_Part).decode


class _Frames(asyncio.Protocol):
    """A connection that carries messages, each with its length before it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(buffer[:_HEADER_BYTES], "big")
            if len(buffer) < end:
                return
            frame = bytes(buffer[_HEADER_BYTES:end])
            del buffer[:end]
            self.received(frame)

    def send(self, frame: bytes) -> None:
        self.transport.write(len(frame).to_bytes(_HEADER_BYTES, "big") + frame)

    def received(self, frame: bytes) -> None:
        raise NotImplementedError


class TransferServer:
    """Serves reads of one engine's memory."""

    def __init__(self, engine_id: str, pool: BlockPool, watcher: Watcher, *, host: str, port: int = 0) -> None:
        """Takes the port (0: any) at once; serves from `start` on. Raises OSError when it is taken."""
        self.engine_id = engine_id
        self._pool = pool
        self._watcher = watcher
        self._listener = socket.create_server((host, port), backlog=128)
        self._connections: set[_Frames] = set()
        self._slow: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port: int = self._listener.getsockname()[1]

    async def start(self) -> None:
        """Begins to serve."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Serving(self), sock=self._listener)

    def close(self) -> None:
        """Ends all reads."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for task in self._slow:
            task.cancel()
        for connection in list(self._connections):
            connection.transport.abort()

    def opened(self, connection: _Frames) -> None:
        self._connections.add(connection)

    def closed(self, connection: _Frames) -> None:
        self._connections.discard(connection)

    def serve(self, connection: _Frames, read: ReadRequest) -> None:
        self._watcher.read_started(read)
        if read.pause_s:
            task = asyncio.get_running_loop().create_task(self._serve_slowly(connection, read))
            self._slow.add(task)
            task.add_done_callback(self._slow.discard)
            return
        try:
            content = b"".join([self._copy(read, block_id) for block_id in read.block_ids])
        except IndexError:
            content = b""
        connection.send(_encode(_Part(read.read_id, 0, content)))

    async def _serve_slowly(self, connection: _Frames, read: ReadRequest) -> None:
        for place, block_id in enumerate(read.block_ids):
            await asyncio.sleep(read.pause_s)
            if connection.transport.is_closing():
                return
            try:
                content = self._copy(read, block_id)
            except IndexError:
                content = b""
            connection.send(_encode(_Part(read.read_id, place, content)))
            if not content:
                return

    def _copy(self, read: ReadRequest, block_id: int) -> bytes:
        content = self._pool.read(block_id)
        self._watcher.block_copied(read, block_id)
        return content


class _Serving(_Frames):
    """A reader's connection, at the holder."""

    def __init__(self, server: TransferServer) -> None:
        super().__init__()
        self._server = server
        self._meant = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.closed(self)

    def received(self, frame: bytes) -> None:
        if not self._meant:
            self._meant = frame.decode() == self._server.engine_id
            if not self._meant:
                self.transport.abort()
            return
        self._server.serve(self, _decode_request(frame))


class Read:
    """A read under way, as NIXL's handle of a transfer."""

    def __init__(self, local_block_ids: Sequence[int], done: "Callable[[Read], None]") -> None:
        self.state: Literal["PROC", "DONE", "ERR"] = "PROC"
        self._local = local_block_ids
        self._missing = len(local_block_ids)
        self._done = done

    def take(self, part: _Part, pool: BlockPool) -> None:
        """Writes blocks where they belong, at once: local memory changes while a read goes on."""
        if not part.content:
            self.end("ERR")
            return
        size = pool.block_bytes
        count = len(part.content) // size
        for place in range(count):
            pool.write(self._local[part.first + place], part.content[place * size : (place + 1) * size])
        self._missing -= count
        if not self._missing:
            self.end("DONE")

    def end(self, state: Literal["DONE", "ERR"]) -> None:
        """Ends the read, once."""
        if self.state == "PROC":
            self.state = state
            self._done(self)


class Peer:
    """The way to one remote engine: one connection, made when it is first needed and again when it was lost."""

    def __init__(self, host: str, port: int, engine_id: str, pool: BlockPool) -> None:
        self._host = host
        self._port = port
        self._engine_id = engine_id
        self._pool = pool
        self._connection: _Reading | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self._reads: dict[int, Read] = {}

    def start(self, request: ReadRequest, read: Read) -> None:
        """Starts a read; it ends as failed when the engine cannot be reached or goes away."""
        self._reads[request.read_id] = read
        frame = _encode(request)
        if self._connection is not None:
            self._connection.send(frame)
            return
        self._unsent.append(frame)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def close(self) -> None:
        """Ends the connection and all reads on it."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.transport.abort()
        self.lost()

    def received(self, part: _Part) -> None:
        read = self._reads.get(part.read_id)
        if read is None:
            return
        read.take(part, self._pool)
        if read.state != "PROC":
            self._reads.pop(part.read_id, None)

    def lost(self) -> None:
        self._connection = None
        reads, self._reads = self._reads, {}
        self._unsent.clear()
        for read in reads.values():
            read.end("ERR")

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: _Reading(self), self._host, self._port)
        except OSError:
            self.lost()
            return
        finally:
            self._connecting = None
        self._connection = connection
        connection.send(self._engine_id.encode())
        for frame in self._unsent:
            connection.send(frame)
        self._unsent.clear()


class _Reading(_Frames):
    """The connection to a holder, at the reader."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def connection_lost(self, exc: Exception | None) -> None:
        self._peer.lost()

    def received(self, frame: bytes) -> None:
        self._peer.received(_decode_part(frame))
