"""HTTPS handshakes, in memory."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from backhaul_common.tls import CallerContext, Identity, ListenerContext, TlsFiles
from backhaul_local.certificates import Authority
from tests.fakes.certificates import OVER, both, identity, take


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


class Side:
    """One end of a connection."""

    def __init__(self, make: Callable[[ssl.MemoryBIO, ssl.MemoryBIO], ssl.SSLObject]) -> None:
        self.inward, self.outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = make(self.inward, self.outward)

    def step(self) -> bool:
        """Goes on as far as it can; tells whether it has shaken hands. Raises ssl.SSLError."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True


def shakes(listener: ListenerContext, context: ssl.SSLContext, host: str | None = "localhost") -> bool:
    """Tells whether two shake hands."""
    server = Side(lambda inward, outward: listener.front.wrap_bio(inward, outward, server_side=True))
    client = Side(lambda inward, outward: context.wrap_bio(inward, outward, server_hostname=host))
    done = False
    try:
        for _ in range(6):
            client_done = client.step()
            server.inward.write(client.outward.read())
            done = server.step() and client_done
            client.inward.write(server.outward.read())
    except ssl.SSLError:
        return False
    return done


def client(tls: Identity) -> ssl.SSLContext:
    return CallerContext(tls).current()


def test_only_who_shows_a_certificate_of_the_ca_is_let_in(authority: Authority, stranger: Authority) -> None:
    listener = ListenerContext(identity(authority.issue("router"), authority))
    assert shakes(listener, client(identity(authority.issue("client"), authority)))
    assert not shakes(listener, client(identity(stranger.issue("client"), authority)))
    assert not shakes(listener, client(identity(authority.issue("old", life=OVER), authority)))
    assert not shakes(listener, client(identity(None, authority)))


def test_only_a_server_of_the_ca_and_of_that_host_is_talked_to(authority: Authority, stranger: Authority) -> None:
    ours = client(identity(authority.issue("client"), authority))
    assert shakes(ListenerContext(identity(authority.issue("router"))), ours)
    assert not shakes(ListenerContext(identity(authority.issue("away", hosts=("elsewhere",)))), ours)
    assert not shakes(ListenerContext(identity(authority.issue("old", life=OVER))), ours)
    assert not shakes(ListenerContext(identity(stranger.issue("router"))), ours)


def test_where_nobody_needs_a_certificate_older_clients_are_served(authority: Authority) -> None:
    older = client(identity(None, authority))
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shakes(ListenerContext(identity(authority.issue("router"))), older)


def test_where_certificates_are_needed_no_session_can_be_taken_up_without_one(authority: Authority) -> None:
    listener = ListenerContext(identity(authority.issue("router"), authority))
    older = client(identity(authority.issue("client"), authority))
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    assert not shakes(listener, older)
    assert listener.front.num_tickets == 0


def test_each_handshake_is_under_what_is_in_force(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    pair, ca = authority.issue("router"), both(tmp_path / "ca.pem", authority)
    tls = Identity("clients", TlsFiles(cert=str(pair.cert), key=str(pair.key), ca=str(ca)))
    listener, caller = ListenerContext(tls), CallerContext(tls)
    before, after = (client(identity(by.issue("client"), by)) for by in (authority, stranger))
    assert (shakes(listener, before), shakes(listener, after)) == (True, False)
    assert caller.current() is caller.current()
    standing = caller.current()

    take(stranger.issue("router"), pair)
    both(ca, stranger)
    tls.look()

    assert (shakes(listener, before), shakes(listener, after)) == (False, True)
    assert not shakes(listener, standing)
    assert shakes(listener, caller.current())
