"""Network addresses as settings name them: host:port, IPv6 in brackets."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from backhaul_common.config import Texts

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):([0-9]{1,5})")


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port; the host comes without brackets.

    Raises ValueError for anything else.
    """
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 <= int(match[2]) <= 65535:
        raise ValueError(f"must be host:port, IPv6 in brackets: {address!r}")
    return match[1].strip("[]"), int(match[2])


def join_address(host: str, port: int) -> str:
    """Returns host:port, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loopback(address: str) -> bool:
    """Tells whether host:port is reached from this machine alone."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(address: str) -> str:
    split_address(address)
    return address


def _checked_if_given(address: str) -> str:
    return _checked(address) if address else address


def _all_checked(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if not addresses:
        raise ValueError("at least one address is needed")
    return tuple(map(_checked, addresses))


Address = Annotated[str, AfterValidator(_checked)]
"""One address."""

OptionalAddress = Annotated[str, AfterValidator(_checked_if_given)]
"""One address or an empty text."""

Addresses = Annotated[Texts, AfterValidator(_all_checked)]
"""Several addresses, at least one; written like `Texts`."""
