"""Whether everybody is there and can be reached."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from backhaul_cli.core.finding import Finding, error, note, warning
from backhaul_cli.core.snapshot import Node, Snapshot
from backhaul_common.addresses import join_address, loopback


def registries(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds registry replicas that do not answer."""
    answering = [registry for registry in snapshot.registries if not registry.problem]
    for registry in snapshot.registries:
        if registry.problem:
            make = warning if answering else error
            yield make(
                "registry-unreachable",
                f"registry {registry.address}",
                f"The registry does not answer: {registry.problem}. Without any, nothing is found and turns are cold.",
                "See that it runs and that --registry names its --listen address; under TLS give --tls-ca and, where "
                "it goes by a name, --tls-registry-name.",
            )


def nodes(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds roles that nobody has, nodes that take no turns, and agents that routers cannot reach."""
    if snapshot.nodes is None:
        return
    for role in ("prefill", "decode"):
        if not any(node.role == role for node in snapshot.nodes):
            yield error(
                f"no-{role}-node",
                "cluster",
                f"No {role} node has joined: there is nothing to exchange blocks with.",
                f"Start a node agent with --role {role} beside each vLLM server that is to {_work(role)}, with its "
                "--registry naming these registries; its log says why it cannot join.",
            )
    for node in snapshot.nodes:
        yield from _state(node)
        yield from _agent(node, snapshot)
        yield from _advertised(node, snapshot)


def router(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds a router that does not answer, or is not ready."""
    if snapshot.router is None:
        return
    subject = f"router {snapshot.router.url}"
    if snapshot.router.problem:
        yield note(
            "router-unreachable",
            subject,
            f"The router could not be asked: {snapshot.router.problem}. Chat templates were not tried.",
            "Give its HTTP address with --router, and with tenants a key with --key-file.",
        )
    elif snapshot.router.not_ready:
        yield error(
            "router-not-ready",
            subject,
            f"The router is not ready, so load balancers send it no turns: {snapshot.router.not_ready}.",
            "Mend what is found about nodes; a router that finds nothing at all cannot reach its --registry.",
        )


def _work(role: str) -> str:
    return "compute prompts" if role == "prefill" else "generate answers"


def _state(node: Node) -> Iterator[Finding]:
    if node.state == "not-ready":
        yield error(
            "node-not-ready",
            node.node_id,
            f"The node takes no turns: {node.state_reason or 'it does not say why'}.",
            f"See that vLLM answers at {node.engine_url}/health, and that the agent's --engine-url names it.",
        )
    elif node.state == "draining":
        yield warning(
            "node-draining",
            node.node_id,
            f"The node takes nothing new: {node.state_reason or 'it is being drained'}.",
            "If nobody means to take it out of service, restart its agent: there is no other way back.",
        )


def _agent(node: Node, snapshot: Snapshot) -> Iterator[Finding]:
    agent = snapshot.agents.get(node.node_id)
    if agent is None or not agent.problem:
        if agent is not None and agent.too_old:
            yield note(
                "agent-too-old",
                node.node_id,
                "The agent is too old to say how it is set up: NIXL, leases, clocks and KV events were not looked at.",
                "Upgrade it to the version of this command.",
            )
        return
    if agent.refused:
        yield note(
            "agent-refuses",
            node.node_id,
            f"The agent is there and refuses to be asked: {agent.problem}.",
            "Show it a certificate that its --tls-callers names: --tls-cert, --tls-key.",
        )
        return
    yield error(
        "agent-unreachable",
        node.node_id,
        f"The agent does not answer at {node.agent_address}, where routers look for it: {agent.problem}. What its "
        "engine holds cannot be claimed.",
        "Set --advertise of the agent to an address that routers reach, let the port through, and, where this machine "
        "is the only one that cannot reach it, run doctor where the routers are.",
    )


def _advertised(node: Node, snapshot: Snapshot) -> Iterator[Finding]:
    """A cluster whose registries all are on this machine may be on this machine as a whole."""
    elsewhere = not all(loopback(registry.address) for registry in snapshot.registries)
    if elsewhere and _local(node.agent_address):
        yield error(
            "agent-address-local",
            node.node_id,
            f"The agent tells routers to reach it at {node.agent_address}, which no other machine can.",
            "Set its --advertise to host:port with an address of its machine.",
        )
    agent = snapshot.agents.get(node.node_id)
    if (elsewhere and _local_url(node.engine_url)) or (agent is not None and agent.engine_url_problem):
        yield error(
            "engine-url-local",
            node.node_id,
            f"Routers are told to reach vLLM at {node.engine_url}, which no other machine can.",
            "Set --advertise-engine-url of the agent to vLLM's URL with an address of its machine.",
        )


def _local(address: str) -> bool:
    """Tells whether host:port is reached from its own machine alone; what is no address is reached from none."""
    try:
        return loopback(address)
    except ValueError:
        return False


def _local_url(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return _local(join_address(host, 0))
