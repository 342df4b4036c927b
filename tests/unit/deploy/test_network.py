"""Who may talk to whom in Kubernetes: the hops of the design's picture, and no others."""

from typing import Any

import pytest

from tests.unit.deploy import started
from tests.unit.deploy.cluster import OVERLAYS, containers, of_kind

NIXL = {(5600, 5600), (21000, 21999)}
"""Side channel, and where transfers listen."""

ANYONE, ETCD, PROMETHEUS = "anyone", "backhaul-etcd", "monitoring"

MEASURED = ("backhaul-router", "backhaul-registry", "backhaul-prefill", "backhaul-decode")

HOPS = {
    (ANYONE, "backhaul-router"): {(8080, 8080), (8081, 8081)},
    ("backhaul-router", "backhaul-registry"): {(7100, 7100)},
    # Legs of turns; claims, and what engines have to do.
    ("backhaul-router", "backhaul-prefill"): {(8000, 8000), (7201, 7201)},
    ("backhaul-router", "backhaul-decode"): {(8000, 8000), (7201, 7201)},
    # Agents, which are in the engines' pods.
    ("backhaul-prefill", "backhaul-registry"): {(7100, 7100)},
    ("backhaul-decode", "backhaul-registry"): {(7100, 7100)},
    ("backhaul-registry", ETCD): {(2379, 2379)},
    ("backhaul-prefill", "backhaul-decode"): NIXL,
    ("backhaul-decode", "backhaul-prefill"): NIXL,
    **{(PROMETHEUS, name): {(9464, 9464)} for name in MEASURED},
}

Hops = dict[tuple[str, str], set[tuple[int, int]]]

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


def names_of(selector: dict[str, Any]) -> list[str]:
    """Returns the names of the pods that a selector takes."""
    if "matchLabels" in selector:
        return [selector["matchLabels"]["app.kubernetes.io/name"]]
    (expression,) = selector["matchExpressions"]
    assert (expression["key"], expression["operator"]) == ("app.kubernetes.io/name", "In")
    return list(expression["values"])


def peers_of(rule: dict[str, Any], side: str) -> list[str]:
    if side not in rule:
        return [ANYONE]
    names: list[str] = []
    for peer in rule[side]:
        if "ipBlock" in peer:
            # An etcd that is elsewhere.
            names.append(ETCD)
        elif "namespaceSelector" in peer:
            names.append(peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])
        else:
            names += names_of(peer["podSelector"])
    return names


def ports_of(rule: dict[str, Any]) -> set[tuple[int, int]]:
    assert {port["protocol"] for port in rule["ports"]} == {"TCP"}
    return {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}


def allowed(overlay: str, direction: str, side: str) -> Hops:
    """Returns the hops that one direction's rules allow."""
    hops: Hops = {}
    for policy in of_kind(overlay, "NetworkPolicy"):
        if policy["spec"]["podSelector"] == {}:
            continue
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["spec"].get(direction, []):
            for name in names_of(policy["spec"]["podSelector"]):
                for peer in peers_of(rule, side):
                    hop = (peer, name) if direction == "ingress" else (name, peer)
                    hops.setdefault(hop, set()).update(ports_of(rule))
    return hops


def test_exactly_the_hops_of_the_picture_may_leave(overlay: str) -> None:
    assert allowed(overlay, "egress", "to") == {
        hop: ports for hop, ports in HOPS.items() if hop[0] not in (ANYONE, PROMETHEUS)
    }


def test_exactly_the_hops_of_the_picture_may_arrive(overlay: str) -> None:
    # An etcd that is elsewhere has rules of its own.
    there = {container.pod for container in containers(overlay)}
    assert allowed(overlay, "ingress", "from") == {hop: ports for hop, ports in HOPS.items() if hop[1] in there}


def test_whoever_is_not_named_may_ask_for_names_only(overlay: str) -> None:
    (default,) = [one["spec"] for one in of_kind(overlay, "NetworkPolicy") if one["spec"]["podSelector"] == {}]
    assert default["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default
    (rule,) = default["egress"]
    assert {port["port"] for port in rule["ports"]} == {53}
    assert all("namespaceSelector" in peer for peer in rule["to"])


def test_every_port_that_may_be_reached_is_one_where_something_listens(overlay: str) -> None:
    listening: dict[str, set[int]] = {}
    for container in containers(overlay):
        listening.setdefault(container.pod, set()).update(container.ports)
    reached = [*allowed(overlay, "egress", "to").items(), *allowed(overlay, "ingress", "from").items()]
    for (_, name), ports in reached:
        if name in listening:
            assert {first for first, last in ports if first == last} <= listening[name]


def test_transfers_listen_where_peers_may_reach_them(overlay: str) -> None:
    for engine in (container for container in containers(overlay) if container.name == "engine"):
        if engine.image == "backhaul-simulator":
            options = started.simulator(engine.args)
            taken = {options.transfer_port, options.notification_port}
            assert all(21000 <= port <= 21999 for port in taken)
        else:
            assert engine.env["UCX_TCP_PORT_RANGE"] == "21000-21999"
