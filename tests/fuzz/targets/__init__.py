"""All targets."""

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    agent,
    callers,
    clients,
    cluster,
    connector_frames,
    connector_params,
    console,
    engine_answers,
    engine_data,
    files,
    registry,
    router_grpc,
    router_http,
    turn_bodies,
)

_MODULES = (
    agent,
    callers,
    clients,
    cluster,
    connector_frames,
    connector_params,
    console,
    engine_answers,
    engine_data,
    files,
    registry,
    router_grpc,
    router_http,
    turn_bodies,
)

TARGETS: tuple[Target, ...] = tuple(target for module in _MODULES for target in module.TARGETS)
