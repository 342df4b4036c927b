"""What a service makes of the flags and variables that it is started with."""

import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from backhaul_common.config import ServiceConfig, load_config
from backhaul_node_agent.config import Config as AgentConfig
from backhaul_registry.config import Config as RegistryConfig
from backhaul_router.config import Config as RouterConfig
from backhaul_simulator.__main__ import _options, _parser
from backhaul_simulator.options import EngineOptions
from tests.unit.deploy.cluster import Container

CONFIGS: Mapping[str, type[ServiceConfig]] = {
    "backhaul-registry": RegistryConfig,
    "backhaul-router": RouterConfig,
    "backhaul-node-agent": AgentConfig,
}
"""By the name of the image, and of the program in it."""


def config(program: str, args: Sequence[str], env: Mapping[str, str]) -> Any:
    """Returns the configuration that a service would run with. Raises SystemExit as it would."""
    with patch.dict(os.environ, env, clear=True):
        return load_config(CONFIGS[program], prog=program, argv=args)


def of_container(container: Container) -> Any:
    """Returns the configuration that a container of Kubernetes' would run with. Raises SystemExit as it would."""
    return config(program_of(container), container.args, container.env)


def program_of(container: Container) -> str:
    """Returns what a container starts; each of our images is named for the program that it starts by itself."""
    return container.command[0] if container.command else container.image


def simulator(args: Sequence[str]) -> EngineOptions:
    """Returns the options that a simulated engine would run with. Raises SystemExit or ValueError as it would."""
    return _options(_parser().parse_args(args))


def ports(settings: ServiceConfig) -> set[int]:
    """Returns the ports on which a service listens."""
    listening = (value for name, value in settings if name.startswith("listen") and value)
    return {int(address.rsplit(":", 1)[1]) for address in listening}
