"""The part of NIXL that vLLM and the node agent use."""

from backhaul_simulator.notifications import nixl_agent, nixl_agent_config

__all__ = ["nixl_agent", "nixl_agent_config"]
