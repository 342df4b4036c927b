"""The connector's settings, from ``kv_connector_extra_config`` and the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backhaul_connector.ledger import MAX_QUEUED

PREFIX = "backhaul_"


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator can set; keys of the extra config are the field names with the prefix ``backhaul_``."""

    agent_socket: str = ""
    """Unix socket of the node agent. Falls back to the environment's BACKHAUL_AGENT_SOCKET. Empty: no agent."""
    min_verified: int = 64
    """Fewest verified tokens for which a handle is used. Below it the decode engine keeps its block set."""
    weights_digest: str = ""
    """Overrides the digest of the weights files, where they cannot be read (remote storage)."""
    nixl_progress_thread: bool = True
    """Whether NIXL runs its progress thread, which takes one core for ever. Off is for CPU demos: an engine that is
    idle and retains nothing then does not answer reads."""

    max_queued: int = MAX_QUEUED
    """Messages that may wait for an agent that reads slowly; one more and it is told all anew."""

    def __post_init__(self) -> None:
        """Raises ValueError when nothing could be said to an agent."""
        if self.max_queued < 1:
            raise ValueError(f"{PREFIX}max_queued must be at least 1, got {self.max_queued}")

    @classmethod
    def of(cls, extra_config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> "Settings":
        """Reads the settings.

        Raises ValueError that names an unknown key, a wrong type or a value that cannot be.
        """
        given = {key[len(PREFIX) :]: value for key, value in extra_config.items() if key.startswith(PREFIX)}
        defaults = cls(agent_socket=environ.get("BACKHAUL_AGENT_SOCKET", ""))
        known = {name: type(getattr(defaults, name)) for name in cls.__dataclass_fields__}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"unknown setting {PREFIX}{name}; known: {', '.join(PREFIX + n for n in known)}")
            if type(value) is not known[name]:
                raise ValueError(f"{PREFIX}{name} must be of type {known[name].__name__}, got {value!r}")
        return cls(**{name: given.get(name, getattr(defaults, name)) for name in known})
