import pytest
from pydantic import ValidationError

from backhaul_common.addresses import Address, Addresses, join_address, split_address
from backhaul_common.config import ServiceConfig, load_config


class Config(ServiceConfig, env_prefix="BACKHAUL_SAMPLE_"):
    listen: Address = "127.0.0.1:1"
    """Address to listen on."""
    peers: Addresses = ("127.0.0.1:2",)
    """Peers."""


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:65535", ("::1", 65535)), ("host:7", ("host", 7))]
)
def test_addresses_are_split_and_joined(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:1\n", "a:65536", "::1:1", "http://a:1", "a:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="host:port"):
        Config(listen=address)
    with pytest.raises(ValidationError, match="host:port"):
        Config(peers=("127.0.0.1:1", address))


def test_several_addresses_are_comma_separated_and_at_least_one() -> None:
    assert load_config(Config, prog="sample", argv=["--peers", "a:1, [::1]:2"]).peers == ("a:1", "[::1]:2")
    with pytest.raises(ValidationError, match="at least one"):
        Config(peers=())
