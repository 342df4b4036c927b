"""Follows the tenants file, and the file with the keys of its tokens, while a router runs."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from backhaul_common.clock import Clock
from backhaul_common.metering import Counter
from backhaul_router import instruments
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.tenants import Tenants, parse_tenants
from backhaul_router.jwt_tokens import JwtTokens

_log = structlog.get_logger(__name__)

LOOK_S = 2.0
"""Between two looks at the files, seconds."""


class TenantsFile:
    """The tenants that the file names, or named when it last could be used."""

    def __init__(self, path: str) -> None:
        """Reads it. Raises ValueError, which names the file and what is wrong with it."""
        self._path = Path(path)
        self._reads = Counter(instruments.TENANT_READS)
        self._seen: dict[Path, bytes | str] = {}
        """What was last read, or why it could not be."""
        self._tenants = self._load()

    @property
    def configured(self) -> bool:
        """Callers must authenticate."""
        return True

    @property
    def limits(self) -> Mapping[str, TenantLimits]:
        """What each tenant may have, by name."""
        return self._tenants.limits

    def authenticate(self, authorization: str | None) -> str:
        """Returns the tenant of an `Authorization` value. Raises ApiError (401)."""
        return self._tenants.authenticate(authorization)

    def check(self, tenant: str) -> None:
        """Raises ApiError (401) for a tenant that is known no more."""
        self._tenants.check(tenant)

    async def follow(self, clock: Clock, on_change: Callable[[Mapping[str, TenantLimits]], None]) -> None:
        """Looks again and again, for ever; tells the limits when there are new tenants."""
        while True:
            await clock.sleep(LOOK_S)
            if await self.look():
                on_change(self.limits)

    async def look(self) -> bool:
        """Reads what has changed; returns whether the tenants are new. What cannot be used changes nothing."""
        try:
            if not await asyncio.to_thread(self._changed):
                return False
            self._tenants = await asyncio.to_thread(self._load)
        except Exception as error:  # noqa: BLE001  # the task border: whatever is in a file, the router goes on
            self._reads.add(1, "refused")
            _log.error("tenants file cannot be used, tenants stay as they are", error=str(error))
            return False
        self._reads.add(1, "taken")
        _log.info("tenants read anew", tenants=len(self.limits), keys=len(self._tenants.keys))
        return True

    def _changed(self) -> bool:
        return any(_content(path) != seen for path, seen in self._seen.items())

    def _load(self) -> Tenants:
        self._seen = {}
        try:
            tenants = parse_tenants(self._read(self._path).decode())
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error
        if tenants.token_settings is None:
            return tenants
        keys_file = self._path.parent / tenants.token_settings.keys_file
        try:
            return replace(tenants, tokens=JwtTokens(tenants.token_settings, self._read(keys_file)))
        except ValueError as error:
            raise ValueError(f"{keys_file}: {error}") from error

    def _read(self, path: Path) -> bytes:
        content = self._seen[path] = _content(path)
        if isinstance(content, str):
            raise ValueError(content)
        return content


def _content(path: Path) -> bytes | str:
    """Returns what a file holds, or why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        return error.strerror or type(error).__name__
