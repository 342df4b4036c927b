"""Envoy's configuration, as it is for deployments and as a stack fills it in."""

from backhaul_local.envoy import TEMPLATE, EnvoyAddresses, envoy_config


def test_ports_of_the_configuration_are_a_stacks_own_with_a_line_for_each_of_several() -> None:
    addresses = EnvoyAddresses(
        listen="127.0.0.1:1", admin="127.0.0.1:2", routers=["127.0.0.1:3", "127.0.0.1:4"], pickers=["127.0.0.1:5"]
    )
    ports = [
        line.split("port_value: ")[1].split("}")[0]
        for line in envoy_config(addresses).splitlines()
        if "port_value" in line
    ]
    assert sorted(ports) == ["1", "2", "3", "4", "5"]


def test_nothing_but_ports_is_replaced() -> None:
    addresses = EnvoyAddresses(
        listen="127.0.0.1:8000", admin="127.0.0.1:9901", routers=["127.0.0.1:8080"], pickers=["127.0.0.1:8082"]
    )
    assert envoy_config(addresses) == TEMPLATE.read_text()
