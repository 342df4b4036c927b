"""Connections to the endpoints of one etcd cluster: channels, failover, authentication."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import UnavailableError
from backhaul_common.etcd import failures
from backhaul_common.etcd.stubs import rpc
from backhaul_common.grpc_client import CHANNEL_OPTIONS
from backhaul_common.tls import Identity, RenewedChannel
from backhaul_common.trace_context import trace_headers

_log = structlog.get_logger(__name__)

_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.keepalive_permit_without_calls"),
    # etcd ends connections that ping without calls (server/embed/etcd.go, PermitWithoutStream: false).
    ("grpc.keepalive_permit_without_calls", 0),
)

_PAUSE_S = 0.1
"""Pause after all endpoints have failed in turn."""

_AUTHENTICATE_S = 3.0
"""Longest wait for a token: etcd hashes the password with bcrypt, which takes its time on a busy machine."""

_REFUSED_S = 5.0
"""How long a refused password is not tried again: whoever waits for it to be set right must not flood etcd's log."""

_YOUNG_S = 5.0
"""A token of this age is not to blame for a call without an answer: a slow etcd must not hash passwords on top."""

T = TypeVar("T")


Metadata = tuple[tuple[str, str], ...]
Call = Callable[[grpc.aio.Channel, Metadata, float], Awaitable[T]]
"""Makes one attempt: on this channel, with this metadata, within these seconds."""


class Connection:
    """Runs calls on the endpoint that works.

    Endpoints are taken in turn: the one in use stays in use until it fails.
    """

    def __init__(
        self,
        *,
        endpoints: tuple[str, ...],
        tls: Identity | None,
        user: str,
        password: str,
        attempt_s: float,
        clock: Clock,
    ) -> None:
        self._endpoints = endpoints
        self._tls = tls
        self._user = user
        self._password = password
        self._attempt_s = attempt_s
        self._clock = clock
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._current = 0
        self._settled = 0
        """The endpoint that answered last."""
        # None: not asked for yet. Empty: this etcd has authentication off.
        self._token: str | None = None
        self._token_since = 0.0
        self._refused: grpc.aio.AioRpcError | None = None
        self._refused_until = 0.0
        # Guards the exchange of the token, so that many calls that fail together ask for one.
        self._token_lock = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._endpoints[self._current]

    async def call(self, attempt: Call[T], *, repeatable: bool, total_s: float) -> T:
        """Returns what ``attempt`` returns, from the first endpoint that answers within ``total_s`` seconds.

        A call that may have had an effect goes to another endpoint only when ``repeatable``. Raises BackhaulError:
        UnavailableError (ETCD_UNAVAILABLE) when no endpoint answers, else what etcd says.
        """
        deadline = self._clock.monotonic() + total_s
        tries = 0
        # The token that etcd no longer takes, once it has said so: a second time is not a matter of age.
        rejected: str | None = None
        while True:
            index, token = self._current, self._token
            left_s = deadline - self._clock.monotonic()
            allowed_s = min(self._attempt_s, left_s)
            try:
                if self._user and token == rejected:
                    token = await self._refresh(rejected, left_s)
                answer = await attempt(self.channel(index), self._metadata(token), allowed_s)
                self._note_success(index)
                return answer
            except grpc.aio.AioRpcError as error:
                if failures.token_expired(error.details() or "") and self._user and rejected is None:
                    rejected = token
                    continue
                tries += 1
                if not failures.endpoint_away(error):
                    raise failures.to_backhaul(error, self._endpoints[index]) from error
                # A call whose caller had little time says nothing: a healthy etcd, too, is late now and then, and the
                # next caller with as little time could not wait for another token.
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and allowed_s == self._attempt_s:
                    self._doubt(token)
                self.leave(index)
                pause_s = _PAUSE_S if tries % len(self._endpoints) == 0 else 0.0
                may_repeat = repeatable or failures.not_sent(error)
                if not may_repeat or self._clock.monotonic() + pause_s >= deadline:
                    raise failures.to_backhaul(error, self._endpoints[index]) from error
                await self._clock.sleep(pause_s)

    def reject_token(self) -> None:
        """Forgets the token, for a stream that etcd has ended because of it."""
        self._token = None

    def _doubt(self, token: str | None) -> None:
        """Forgets the token of a call that was not answered.

        A token names the place in etcd's log where it was made, and etcd holds a call until it has come there
        (server/auth/simple_token.go, ``isValidSimpleToken``): for ever, when it was restored from a snapshot since.
        """
        if token == self._token and self._clock.monotonic() - self._token_since >= _YOUNG_S:
            self._token = None

    def channel(self, index: int | None = None) -> grpc.aio.Channel:
        """Returns the channel of an endpoint, by default of the one in use."""
        at = self._current if index is None else index
        if at not in self._channels:
            self._channels[at] = self._open(self._endpoints[at])
        return self._channels[at]

    async def stream(self, total_s: float) -> tuple[int, grpc.aio.Channel, Metadata]:
        """Returns index, channel and metadata for a long-lived stream on the endpoint in use. Raises BackhaulError."""
        try:
            if self._user and self._token is None:
                await self._refresh(None, total_s)
        except grpc.aio.AioRpcError as error:
            raise failures.to_backhaul(error, self.endpoint) from error
        return self._current, self.channel(), self._metadata(self._token)

    def leave(self, index: int) -> None:
        """Moves on from an endpoint that failed, if it is still the one in use."""
        if index == self._current and len(self._endpoints) > 1:
            self._current = (index + 1) % len(self._endpoints)

    def _note_success(self, index: int) -> None:
        # Only where the search ended is told: while no endpoint answers, it goes round and round.
        if index != self._settled:
            _log.info("etcd endpoint changed", endpoint=self._endpoints[index], before=self._endpoints[self._settled])
            self._settled = index

    async def close(self) -> None:
        """Closes all channels; running calls fail."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _refresh(self, stale: str | None, left_s: float) -> str | None:
        """Returns a token other than ``stale``; empty when etcd has authentication off."""
        if left_s <= 0:
            raise UnavailableError("ETCD_UNAVAILABLE", "no time left to authenticate", endpoint=self.endpoint)
        async with self._token_lock:
            if self._token == stale:
                self._token = await self._authenticate(min(_AUTHENTICATE_S, left_s))
                self._token_since = self._clock.monotonic()
            return self._token

    async def _authenticate(self, timeout_s: float) -> str:
        if self._refused is not None and self._clock.monotonic() < self._refused_until:
            raise self._refused
        request = rpc.AuthenticateRequest(name=self._user, password=self._password)
        try:
            answer = await rpc.AuthStub(self.channel()).Authenticate(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if failures.auth_off(error):
                return ""
            if failures.password_refused(error):
                self._refused, self._refused_until = error, self._clock.monotonic() + _REFUSED_S
            raise
        return str(answer.token)

    def _metadata(self, token: str | None) -> Metadata:
        # etcd, api/v3rpc/rpctypes/metadatafields.go: TokenFieldNameGRPC. Its own spans join the trace of a call that is
        # part of one (server/embed/config_tracing.go, `--experimental-enable-distributed-tracing`).
        return (*((("token", token),) if token else ()), *trace_headers().items())

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        return RenewedChannel(self._tls, lambda shown: grpc.aio.secure_channel(endpoint, shown, options=_OPTIONS))
