"""Snapshots as `doctor` gathers them: of a cluster that is well, and parts to replace in it."""

from dataclasses import replace
from typing import Any

from backhaul_cli.core.snapshot import (
    Agent,
    Clock,
    Engine,
    EngineSetup,
    Etcd,
    Nixl,
    Node,
    Registry,
    Router,
    Snapshot,
    TemplateProbe,
)

PROMPT, ANSWER = tuple(range(100)), tuple(range(200, 300))


def engine(name: str, **facts: Any) -> Engine:
    """An engine with which all is well."""
    well: dict[str, Any] = {
        "compatibility_hash": "same-hash",
        "weights_digest": "same-weights",
        "block_size": 32,
        "connector_version": "0.1.0",
        "vllm_version": "0.32.0",
        "second_chance": name.startswith("decode"),
        "tp_size": 1,
    }
    return Engine(engine_id=f"{name}-engine", **{**well, **facts})


def node(name: str, *, engines: tuple[Engine, ...] | None = None, **facts: Any) -> Node:
    """A node of that name, whose role its name begins with."""
    well: dict[str, Any] = {
        "role": name.partition("-")[0],
        "agent_address": "10.0.0.2:7201",
        "engine_url": "http://10.0.0.2:8200",
        "models": ("m",),
    }
    return Node(node_id=name, engines=(engine(name),) if engines is None else engines, **{**well, **facts})


def agent(name: str, setup: EngineSetup | None = None, **facts: Any) -> Agent:
    """The agent of a node with one engine."""
    well: dict[str, Any] = {
        "clock": Clock(ahead_s=0.0, uncertainty_s=0.01),
        "nixl": Nixl.AVAILABLE,
        "kv_events": True,
        "connector_socket": f"/run/backhaul/{name}.sock",
        "engines": {f"{name}-engine": setup or EngineSetup()},
    }
    return Agent(**{**well, **facts})


def registry(**facts: Any) -> Registry:
    """A registry whose etcd is well."""
    well: dict[str, Any] = {
        "address": "10.0.0.1:7100",
        "clock": Clock(ahead_s=0.0, uncertainty_s=0.01),
        "etcd": etcd(),
    }
    return Registry(**{**well, **facts})


def etcd(**facts: Any) -> Etcd:
    """An etcd that is well."""
    well: dict[str, Any] = {"endpoint": "10.0.0.1:2379", "version": "3.5.17", "read_s": 0.002, "write_s": 0.005}
    return Etcd(**{**well, **facts})


def probe(**facts: Any) -> TemplateProbe:
    """A template that only appends."""
    well: dict[str, Any] = {
        "model": "m",
        "kind": "plain",
        "held": PROMPT + ANSWER,
        "prompt_count": len(PROMPT),
        "following": (*PROMPT, *ANSWER, 1, 2, 3),
    }
    return TemplateProbe(**{**well, **facts})


def cluster(*nodes: Node, agents: dict[str, Agent] | None = None, **parts: Any) -> Snapshot:
    """A cluster that is well, but for what is given: one prefill and one decode node by default."""
    there = nodes or (node("prefill-1"), node("decode-1"))
    seen = Snapshot(
        registries=(registry(),),
        nodes=there,
        agents={one.node_id: agent(one.node_id) for one in there} | (agents or {}),
        router=Router(url="http://10.0.0.1:8080"),
        templates=(probe(),),
    )
    return replace(seen, **parts)
