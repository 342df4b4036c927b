"""What can go wrong with the etcd of a stack as a whole: it goes back in time, forgets, fills up, knows no tokens.

At most one of these at a time: a snapshot of a full store must not come back after it was mended.
"""

import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from random import Random

from backhaul_local.etcd import restore_command
from backhaul_local.stack import Stack
from tests.soak.cluster import ETCD_PASSWORD, ETCD_USER
from tests.soak.etcd_admin import EtcdAdmin, Session, encoded
from tests.soak.faults import Fault, NotNowError
from tests.soak.network import BreakableNetwork

_PREFIX, _PREFIX_END = "/default/", "/default0"
_JUNK, _JUNK_END = "/junk/", "/junk0"
_JUNK_BYTES = 512 * 1024
"""Less than the largest request that etcd takes, 1.5 MiB."""
_FILL_S = 20.0


class EtcdFaults:
    """Faults of a stack's etcd, whose authentication this switches on."""

    def __init__(self, stack: Stack, network: BreakableNetwork, snapshots: Path) -> None:
        """``snapshots``: folder for what is restored later."""
        self.admin = EtcdAdmin(stack.etcd_members)
        self._network = network
        self._registries = [f"registry-{index}" for index in range(1, len(stack.registries) + 1)]
        self._snapshots = snapshots
        self._count = 0
        self._deck: list[Fault] = []
        self.admin.guard(user=ETCD_USER, password=ETCD_PASSWORD, prefix=_PREFIX)

    def draw(self, rng: Random) -> Fault:
        """Returns one of all, and none again before each of the others has begun."""
        if not self._deck:
            registry = rng.choice(self._registries)
            self._deck = [self.restore(), self.compact(registry), self.fill(), self.expire_tokens()]
            rng.shuffle(self._deck)
        next_one = self._deck[-1]

        def begin(stack: Stack) -> None:
            next_one.begin(stack)
            self._deck.remove(next_one)

        return replace(next_one, begin=begin)

    def restore(self, *, hold_s: float = 4.0) -> Fault:
        """A snapshot is taken; later all members end, and begin with it: revisions, keys and leases go back."""
        self._count += 1
        snapshot = self._snapshots / f"{self._count}.db"

        def end(stack: Stack) -> None:
            if not snapshot.exists():
                return
            for member in self.admin.members:
                stack.kill(member.name)
                shutil.rmtree(member.data)
                command = restore_command(member, self.admin.members, snapshot)
                subprocess.run(command, check=True, capture_output=True, timeout=30)
            for member in self.admin.members:
                stack.restart(member.name, wait=False)
            snapshot.unlink()

        return Fault("restore etcd", lambda stack: self.admin.snapshot(snapshot), end, hold_s)

    def compact(self, registry: str, *, hold_s: float = 2.0) -> Fault:
        """A registry loses etcd; all revisions that it has not seen are gone when it is back."""
        links = [self._network.link(f"{registry} > {member.name}") for member in self.admin.members]

        def begin(stack: Stack) -> None:
            for link in links:
                link.cut()

        def end(stack: Stack) -> None:
            self.admin.session().compact()
            self.admin.defragment()
            for link in links:
                link.heal()

        return Fault("compact etcd", begin, end, hold_s)

    def fill(self, *, hold_s: float = 3.0) -> Fault:
        """Somebody writes until etcd takes no more; later that is deleted, and its space given back."""

        def begin(stack: Stack) -> None:
            _fill(self.admin)

        def end(stack: Stack) -> None:
            root = self.admin.session()
            root.post("kv/deleterange", {"key": encoded(_JUNK), "range_end": encoded(_JUNK_END)})
            root.compact()
            self.admin.defragment()
            for alarm in root.alarms():
                root.post("maintenance/alarm", {"action": "DEACTIVATE", **alarm})
            if alarms := root.alarms():
                raise NotNowError(f"still raised: {alarms}")

        return Fault("fill etcd", begin, end, hold_s)

    def expire_tokens(self, *, hold_s: float = 0.5) -> Fault:
        """All tokens become invalid while they are in use; that it is so is tried with one."""

        def begin(stack: Stack) -> None:
            root, user = self.admin.session(), self.admin.session(ETCD_USER, ETCD_PASSWORD)
            _read(user)
            root.post("auth/disable", {})
            self._enable()
            try:
                _read(user)
            except NotNowError as error:
                if "invalid auth token" not in str(error):
                    raise
            else:
                raise AssertionError("an old token is still good")

        return Fault("expire-tokens etcd", begin, lambda stack: self._enable(), hold_s)

    def _enable(self) -> None:
        self.admin.session().post("auth/enable", {})


def _read(session: Session) -> None:
    session.post("kv/range", {"key": encoded(_PREFIX), "range_end": encoded(_PREFIX_END), "limit": 1})


def _fill(admin: EtcdAdmin) -> None:
    junk = encoded("x" * _JUNK_BYTES)
    deadline = time.monotonic() + _FILL_S
    root, number = admin.session(), 0
    while True:
        try:
            root.post("kv/put", {"key": encoded(f"{_JUNK}{number}"), "value": junk})
            number += 1
        except NotNowError as error:
            if "database space exceeded" in str(error):
                return
            if time.monotonic() > deadline:
                raise
            # Another member may lead by now, and hear nothing of this one's.
            root = admin.session()
