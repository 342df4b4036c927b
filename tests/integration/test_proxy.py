"""The proxy that tests put between two parts: what passes, and what becomes of it when the link breaks."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fakes.proxy import Proxy

_WAIT_S = 20.0
_QUIET_S = 0.2


@contextmanager
def link(path: Path | None) -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """A proxy, and the two ends of a connection through it, on Unix sockets or on TCP."""
    with ExitStack() as exits:
        listener = exits.enter_context(socket.socket(socket.AF_UNIX if path else socket.AF_INET))
        listener.bind(str(path) if path else ("127.0.0.1", 0))
        listener.listen()
        target = str(path) if path else f"127.0.0.1:{listener.getsockname()[1]}"
        proxy = exits.enter_context(Proxy(target))
        near = exits.enter_context(connected(proxy))
        far = exits.enter_context(listener.accept()[0])
        far.settimeout(_WAIT_S)
        near.sendall(b"first")
        assert far.recv(100) == b"first"
        yield proxy, near, far


def connected(proxy: Proxy) -> socket.socket:
    """Returns a client's socket."""
    host, _, port = proxy.address.rpartition(":")
    near = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
    near.settimeout(_WAIT_S)
    try:
        near.connect((host, int(port)) if host else proxy.address)
    except OSError:
        near.close()
        raise
    return near


@pytest.fixture(params=["tcp", "unix"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "s" if request.param == "unix" else None


def is_quiet(end: socket.socket) -> bool:
    """Tells whether nothing arrives for a moment."""
    end.settimeout(_QUIET_S)
    try:
        end.recv(100)
    except TimeoutError:
        return True
    finally:
        end.settimeout(_WAIT_S)
    return False


def ended(end: socket.socket) -> bool:
    """Tells whether a connection is over."""
    try:
        return end.recv(100) == b""
    except ConnectionError:
        return True


def refuses(proxy: Proxy) -> bool:
    """Tells whether a new connection is over at once, be it while it is made."""
    try:
        with connected(proxy) as end:
            return ended(end)
    except ConnectionError:
        return True


def test_what_one_end_says_the_other_hears_to_the_end(path: Path | None) -> None:
    with link(path) as (_, near, far):
        far.sendall(b"x" * 100_000)
        far.shutdown(socket.SHUT_WR)
        heard = bytearray()
        while piece := near.recv(30_000):
            heard += piece
        assert len(heard) == 100_000
        near.sendall(b"still heard")
        assert far.recv(100) == b"still heard"


def test_a_cut_link_ends_its_connections_and_takes_none_until_it_is_healed(path: Path | None) -> None:
    with link(path) as (proxy, near, far):
        proxy.cut()
        assert ended(near)
        assert ended(far)
        assert refuses(proxy)
        proxy.heal()
        with connected(proxy) as again:
            again.sendall(b"again")
            assert is_quiet(again)


def test_a_silent_link_keeps_its_connections_and_what_was_said(path: Path | None) -> None:
    with link(path) as (proxy, near, far):
        proxy.swallow()
        near.sendall(b"there")
        far.sendall(b"back")
        assert is_quiet(near)
        assert is_quiet(far)
        proxy.heal()
        assert (far.recv(100), near.recv(100)) == (b"there", b"back")


def test_what_is_said_on_a_slow_link_arrives_late(path: Path | None) -> None:
    with link(path) as (proxy, near, far):
        proxy.delay_s = 0.3
        said = time.monotonic()
        near.sendall(b"there")
        assert far.recv(100) == b"there"
        assert time.monotonic() - said >= 0.3


def test_what_was_written_to_a_unix_socket_arrives_although_its_writer_dies_or_the_link_is_cut(tmp_path: Path) -> None:
    with link(tmp_path / "a") as (proxy, near, far):
        proxy.swallow()
        near.sendall(b"for nobody")
        far.sendall(b"granted")
        far.close()
        proxy.heal()
        assert near.recv(100) == b"granted"
        assert ended(near)
    with link(tmp_path / "b") as (proxy, near, far):
        proxy.delay_s = 0.3
        far.sendall(b"granted")
        proxy.cut()
        assert near.recv(100) == b"granted"
        assert ended(near)
        with pytest.raises(BrokenPipeError):
            far.sendall(b"not granted")
