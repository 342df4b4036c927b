"""What a service shows of itself over TLS, and whom it trusts, as the files say it now."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import structlog

from backhaul_common.clock import Clock, time_of_day
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.instruments import TLS_REMAINING
from backhaul_common.metering import Values, observe
from backhaul_common.tls.files import Material, TlsFiles, read_material

_log = structlog.get_logger(__name__)

LOOK_S = 5.0
"""Between two looks at the files, seconds."""

WARN_FROM = timedelta(days=14)
"""How long before its end a certificate is warned of, once a day."""

Now = Callable[[], datetime]


class Identity:
    """Takes new files while the service runs; files that do not fit together leave what was there in force."""

    def __init__(self, name: str, files: TlsFiles, *, now: Now = time_of_day) -> None:
        """`name` says what it is for, in logs and metrics. Raises InvalidArgumentError (TLS_FILES)."""
        self.name = name
        self._files = files
        self._now = now
        self._seen = self._state()
        self._problem = ""
        """Why what the files hold is not in force; empty: it is."""
        self._warned_days: int | None = None
        self.material = read_material(files, now())
        """What is in force. Another object as soon as anything is new."""

    def look(self) -> None:
        """Takes what is new in the files. Never raises."""
        state = self._state()
        # What could not be used may become usable by itself: a certificate of tomorrow.
        if state != self._seen or self._problem:
            self._seen = state
            self._take()
        self._warn()

    def left(self) -> timedelta | None:
        """Returns how long it can be used; None: for ever."""
        return self.material.expires - self._now() if self.material.expires else None

    def _take(self) -> None:
        try:
            material = read_material(self._files, self._now())
        except InvalidArgumentError as error:
            if error.message != self._problem:
                _log.warning("new TLS files not taken, the old stay in force", name=self.name, problem=error.message)
            self._problem = error.message
            return
        self._problem = ""
        if material != self.material:
            self.material, self._warned_days = material, None
            _log.info("TLS files taken", name=self.name, expires=_text(material))

    def _warn(self) -> None:
        left = self.left()
        if left is None or left > WARN_FROM or left.days == self._warned_days:
            return
        self._warned_days = left.days
        fields = {"name": self.name, "expires": _text(self.material), "what_to_do": "put new files in place of the old"}
        if left > timedelta():
            _log.warning("certificate or CA ends soon", **fields)
        else:
            _log.warning("certificate or CA has expired: peers refuse it", **fields)

    def _state(self) -> list[tuple[int, ...]]:
        """Returns what changes when a file is written, gets other rights, or gives way to another."""
        return [_stat(path) for path in (self._files.cert, self._files.key, self._files.ca) if path]


async def keep_current(*parts: Identity | None, clock: Clock) -> None:
    """Looks at their files again and again, until cancelled, and has their remaining time measured."""
    identities = [part for part in parts if part is not None]
    observe_remaining(identities)
    while True:
        for identity in identities:
            # Files may be on a disk that hangs.
            await asyncio.to_thread(identity.look)
        await clock.sleep(LOOK_S)


def observe_remaining(identities: Sequence[Identity]) -> None:
    """Has it measured, whenever metrics are read, how long each can be used."""

    def remaining() -> Values:
        lefts = ((identity.name, identity.left()) for identity in identities)
        return {(name,): left.total_seconds() for name, left in lefts if left is not None}

    observe(TLS_REMAINING, remaining)


def _text(material: Material) -> str | None:
    return material.expires.isoformat() if material.expires else None


def _stat(path: str) -> tuple[int, ...]:
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns
