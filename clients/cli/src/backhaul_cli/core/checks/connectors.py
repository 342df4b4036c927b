"""Whether engines run the connector, set up so that blocks can be read back; and their agents what they need."""

from collections.abc import Iterator

from backhaul_cli.core.finding import Finding, error, warning
from backhaul_cli.core.snapshot import Agent, Engine, Nixl, Node, Snapshot

_SETTINGS = (
    ("bidirectional_kv_xfer", "bidirectional-off"),
    ("kv_load_failure_policy", "load-failure-policy"),
    ("kv_lease_duration", "lease-too-short"),
    ("kv_buffer_device", "host-buffers"),
    ("backhaul_agent_socket", "no-agent-socket"),
    ("VLLM_NIXL_SIDE_CHANNEL_HOST", "side-channel-local"),
    ("the weights digest is not known yet", "weights-unknown"),
    ("connector is not connected", "connector-away"),
)
"""Parts of what the directory says of an engine that cannot reuse blocks (`backhaul_connector/engine.py`,
``reuse_problem``; `backhaul_node_agent/core/node.py`, ``_reuse_problem``), and the check that each stands for."""

_FIXES = {
    "bidirectional-off": (
        'Set "bidirectional_kv_xfer": true in kv_connector_extra_config of --kv-transfer-config, on prefill AND decode '
        "engines, and restart vLLM."
    ),
    "load-failure-policy": 'Set "kv_load_failure_policy": "fail" in --kv-transfer-config and restart vLLM.',
    "lease-too-short": 'Set "kv_lease_duration": 180 in kv_connector_extra_config and restart vLLM.',
    "host-buffers": 'Leave "kv_buffer_device" at the engine\'s own device: blocks in host buffers cannot be read back.',
    "no-agent-socket": "Set BACKHAUL_AGENT_SOCKET in vLLM's environment to the --connector-socket of its agent.",
    "side-channel-local": (
        "Set VLLM_NIXL_SIDE_CHANNEL_HOST in vLLM's environment to an address of its machine that the other engines "
        "reach, and restart vLLM."
    ),
    "weights-unknown": (
        "Wait: it is computed in the background. Where the files cannot be read (remote or dummy weights), set "
        '"backhaul_weights_digest" in kv_connector_extra_config.'
    ),
    "connector-away": (
        "See that both name the same socket (BACKHAUL_AGENT_SOCKET of vLLM, --connector-socket of the agent), that the "
        "folder is shared, and that both run as the same user."
    ),
}


def connectors(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds engines without the connector, or with one that cannot reuse blocks."""
    for node in snapshot.nodes or ():
        agent = snapshot.agents.get(node.node_id, Agent())
        if not node.engines and node.state != "not-ready":
            yield error(
                "no-engine",
                node.node_id,
                "The agent knows no engine: no connector has come, and nothing answers on the side channel.",
                f"Load the connector ({_how(agent)}), and give the agent the --side-channel of the server.",
            )
        for engine in node.engines:
            if not engine.connector_version:
                yield _missing(node, engine, agent)
            elif not engine.reuse and node.state != "not-ready":
                yield _problem(node, engine)


def nixl(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds decode nodes whose agents cannot renew or release."""
    for node in snapshot.nodes or ():
        if node.role == "decode" and snapshot.agents.get(node.node_id, Agent()).nixl is Nixl.MISSING:
            yield warning(
                "nixl-missing",
                node.node_id,
                "The agent runs without NIXL: nothing is renewed or freed early, so a conversation is forgotten after "
                "decoder_kv_blocks_ttl, and its blocks stay pinned until then.",
                "In the agent's environment: pip install --no-deps -r services/node-agent/requirements-nixl.txt; then "
                "restart the agent.",
            )


def kv_events(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds decode nodes that can give no second chances."""
    for node in snapshot.nodes or ():
        if node.role != "decode" or any(engine.second_chance for engine in node.engines):
            continue
        agent = snapshot.agents.get(node.node_id, Agent())
        if agent.kv_events is False:
            yield warning(
                "kv-events-missing",
                node.node_id,
                "The agent does not follow KV events: there are no second chances for blocks that are retained no "
                "more, though the engine may still cache them.",
                'Start vLLM with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": '
                '"tcp://*:5557"}\', and the agent with --kv-events tcp://HOST:5557.',
            )


def _where(node: Node, engine: Engine) -> str:
    return node.node_id if len(node.engines) == 1 else f"{node.node_id} rank {engine.rank}"


def _missing(node: Node, engine: Engine, agent: Agent) -> Finding:
    if node.role != "decode":
        follows = "it cannot prove which tokens it may read, so nothing that was retained is read there"
    elif engine.second_chance:
        follows = "what it computes is not retained, and only second chances are left: what it happens to cache still"
    else:
        follows = "what it computes is not retained for the next turn"
    make = warning if engine.second_chance else error
    return make(
        "connector-missing",
        _where(node, engine),
        f"No connector of the {node.role} engine has come to its agent: {follows}.",
        f"Load the connector: {_how(agent)}. Where it is loaded, BACKHAUL_AGENT_SOCKET names another socket.",
    )


def _how(agent: Agent) -> str:
    socket = agent.connector_socket or "the --connector-socket of its agent"
    return (
        "install services/node-agent/connector in vLLM's environment, start vLLM with "
        '"kv_connector": "NixlConnector", "kv_connector_module_path": "backhaul_connector" in --kv-transfer-config, '
        f"and BACKHAUL_AGENT_SOCKET={socket}"
    )


def _problem(node: Node, engine: Engine) -> Finding:
    check = next((check for part, check in _SETTINGS if part in engine.reuse_problem), "reuse-off")
    return error(
        check,
        _where(node, engine),
        f"The {node.role} engine cannot reuse blocks: {engine.reuse_problem or 'it does not say why'}.",
        _FIXES.get(check, "Do as it says; docs/engines.md lists what engines need."),
    )
