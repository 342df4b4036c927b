"""Proxies between the parts of a stack, so that a test can break what lies between them."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.fakes.tcp_proxy import TcpProxy


class BreakableNetwork:
    """One proxy for each pair of parts; links are named ``source > target``. Ends its proxies on exit."""

    def __init__(self) -> None:
        self._links: dict[str, TcpProxy] = {}
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
        proxy = self._exit.enter_context(TcpProxy(address))
        self._links[f"{source} > {target}"] = proxy
        return proxy.address

    def link(self, name: str) -> TcpProxy:
        """Returns the proxy of a link. Raises KeyError for an unknown one."""
        return self._links[name]
