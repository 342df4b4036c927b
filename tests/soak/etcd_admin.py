"""Who looks after the etcd of a stack: users, space, compaction, snapshots."""

import base64
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backhaul_local.etcd import EtcdMember, etcd_tool
from tests.soak.faults import NotNowError

_TIMEOUT_S = 2.0
"""Short: while somebody waits, nothing that is broken can be mended."""
_DEFRAGMENT_S = 10.0
_ROOT, _ROOT_PASSWORD = "root", "rootpw"
_AUTH_OFF = "authentication is not enabled"


@dataclass(frozen=True, slots=True)
class Session:
    """Calls to one member over etcd's JSON gateway, as one user. Every call may raise NotNowError."""

    endpoint: str
    token: str

    def post(self, path: str, document: dict[str, Any], *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """Makes one call. Raises NotNowError with etcd's words, too, when it refuses."""
        headers = {"content-type": "application/json", **({"authorization": self.token} if self.token else {})}
        request = urllib.request.Request(
            f"http://{self.endpoint}/v3/{path}", data=json.dumps(document).encode(), headers=headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise NotNowError(f"{path} at {self.endpoint}: {error.read().decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise NotNowError(f"{path} at {self.endpoint}: {error}") from error
        return answer

    def revision(self) -> int:
        """Returns the store's revision, as of now."""
        return int(self.post("kv/range", {"key": encoded("/"), "limit": 1})["header"]["revision"])

    def compact(self) -> None:
        """Makes etcd forget every revision but the last."""
        try:
            self.post("kv/compaction", {"revision": self.revision(), "physical": True}, timeout_s=_DEFRAGMENT_S)
        except NotNowError as error:
            # An earlier try came as far as this, and nothing was written since.
            if "has been compacted" not in str(error):
                raise

    def alarms(self) -> list[dict[str, str]]:
        """Returns which member has raised which alarm."""
        raised: list[dict[str, str]] = self.post("maintenance/alarm", {"action": "GET"}).get("alarms", [])
        return raised


class EtcdAdmin:
    """The administrator of all members."""

    def __init__(self, members: Sequence[EtcdMember]) -> None:
        self.members = tuple(members)

    def guard(self, *, user: str, password: str, prefix: str) -> None:
        """Switches authentication on, with one user who may do everything below a prefix."""
        root = self.session()
        for name, secret in ((_ROOT, _ROOT_PASSWORD), (user, password)):
            root.post("auth/user/add", {"name": name, "password": secret})
            root.post("auth/role/add", {"name": name})
            root.post("auth/user/grant", {"user": name, "role": name})
        permission = {"permType": "READWRITE", "key": encoded(prefix), "range_end": _end(prefix)}
        root.post("auth/role/grant", {"name": user, "perm": permission})
        root.post("auth/enable", {})

    def session(self, user: str = _ROOT, password: str = _ROOT_PASSWORD) -> Session:
        """Begins a session with the first member that answers. Raises NotNowError when none does."""
        problem = NotNowError("no members")
        for member in self.members:
            try:
                return Session(member.endpoint, _token(member.endpoint, user, password))
            except NotNowError as error:
                problem = error
        raise problem

    def defragment(self) -> None:
        """Gives back all members' free space, once each has applied all that is agreed now."""
        token = self.session().token
        for member in self.members:
            there = Session(member.endpoint, token)
            there.revision()
            there.post("maintenance/defragment", {}, timeout_s=_DEFRAGMENT_S)

    def snapshot(self, path: Path) -> None:
        """Saves a snapshot of the store. Raises NotNowError when no member can."""
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [str(etcd_tool("etcdctl")), "--endpoints", self.session().endpoint]
        command += ["--user", f"{_ROOT}:{_ROOT_PASSWORD}", "snapshot", "save", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=10)
        except subprocess.SubprocessError as error:
            raise NotNowError(f"no snapshot: {error}") from error


def encoded(text: str) -> str:
    """Returns a key or value as the gateway takes it."""
    return base64.b64encode(text.encode()).decode()


def _token(endpoint: str, user: str, password: str) -> str:
    """Returns a new token; an empty one when authentication is off."""
    try:
        answer = Session(endpoint, "").post("auth/authenticate", {"name": user, "password": password})
    except NotNowError as error:
        if _AUTH_OFF in str(error):
            return ""
        raise
    token: str = answer["token"]
    return token


def _end(prefix: str) -> str:
    """Returns the end of the range of all keys with a prefix."""
    return encoded(prefix[:-1] + chr(ord(prefix[-1]) + 1))
