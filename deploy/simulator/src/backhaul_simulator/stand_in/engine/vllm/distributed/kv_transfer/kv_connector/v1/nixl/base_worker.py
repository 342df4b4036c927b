"""The name that Backhaul's connector replaces while agents are made."""

from nixl._api import nixl_agent_config

__all__ = ["nixl_agent_config"]
