"""Passing on what is no turn: who may have it done."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from backhaul_router.core.errors import ApiError
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from backhaul_router.passing import Passing


class _Removed:
    """Tenants, of whom the one that asks was taken out while its request came."""

    configured = True

    def authenticate(self, authorization: str | None) -> str:
        raise NotImplementedError

    def check(self, tenant: str) -> None:
        raise ApiError(401, f"{tenant} is gone")


def _passing() -> Passing:
    """Of which nothing but the tenants is there to be used."""
    nothing: Any = None
    return Passing(
        engines=nothing,
        table=NodeTable(),
        planner=nothing,
        live=nothing,
        tenants=_Removed(),
        scopes=Scopes(Tenants(), b""),
    )


@pytest.mark.parametrize(
    "ask",
    [
        lambda passing: passing.ask("/tokenize", b'{"model": "m", "prompt": "hi"}', tenant="acme", headers={}),
        lambda passing: passing.response("resp_1", tenant="acme", headers={}),
    ],
    ids=["ask", "response"],
)
async def test_a_tenant_that_was_removed_meanwhile_is_refused(ask: Callable[[Passing], Awaitable[object]]) -> None:
    with pytest.raises(ApiError, match="acme is gone") as caught:
        await ask(_passing())
    assert caught.value.status == 401
