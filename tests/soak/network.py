"""Proxies between the parts of a stack, so that a test can break what lies between them."""

from collections.abc import Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.fakes.proxy import Proxy


class BreakableNetwork:
    """One proxy for each pair of parts; links are named ``source > target``. Ends its proxies on exit."""

    def __init__(self, only: Collection[str] = ()) -> None:
        """``only``: names of the links that can be broken; empty: all."""
        self._only = only
        self._links: dict[str, Proxy] = {}
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def names(self) -> list[str]:
        """Names of all links."""
        return list(self._links)

    def between(self, source: str, target: str, address: str) -> str:
        """Puts a proxy before ``address`` and returns the proxy's own."""
        name = f"{source} > {target}"
        if self._only and name not in self._only:
            return address
        proxy = self._exit.enter_context(Proxy(address))
        self._links[name] = proxy
        return proxy.address

    def link(self, name: str) -> Proxy:
        """Returns the proxy of a link. Raises KeyError for an unknown one."""
        return self._links[name]
