"""What Docker Compose is given, with simulated engines and with vLLM."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from tests.unit.deploy import started
from tests.unit.deploy.cluster import ROOT, image_name
from tests.unit.deploy.dockerfiles import env_of

FOLDER = ROOT / "deploy" / "compose"
STACKS = ("compose.override.yaml", "compose.vllm.yaml")

pytestmark = pytest.mark.parametrize("engines", STACKS)


@cache
def stack(engines: str) -> dict[str, Any]:
    """Returns the services of both files together."""
    files = [yaml.safe_load((FOLDER / name).read_text()) for name in ("compose.yaml", engines)]
    return {**files[0]["services"], **files[1]["services"]}


def program_of(service: Mapping[str, Any]) -> str:
    return str(service["entrypoint"][0] if "entrypoint" in service else image_name(service["image"]))


def ours(engines: str) -> Mapping[str, Any]:
    """Returns the configurations of Backhaul's own services by their names."""
    return {
        name: started.config(program, service["command"], settings_in(program))
        for name, service in stack(engines).items()
        if (program := program_of(service)) in started.CONFIGS
    }


def settings_in(program: str) -> dict[str, str]:
    """Returns the settings that are in the program's own image."""
    path = ROOT / "deploy" / "docker" / f"{program.removeprefix('backhaul-')}.Dockerfile"
    return {name: value for name, value in env_of(path).items() if name.startswith("BACKHAUL_")}


def nodes(engines: str) -> list[tuple[str, dict[str, Any], Any]]:
    """Returns each engine's name, the engine, and the configuration of its agent."""
    found = ours(engines)
    return [
        (name, service, found[f"{name}-agent"]) for name, service in stack(engines).items() if f"{name}-agent" in found
    ]


def test_there_are_two_registries_and_two_routers_and_every_flag_is_known(engines: str) -> None:
    names = [name for name in ours(engines) if not name.endswith("-agent")]
    assert names == ["registry-1", "registry-2", "router-1", "router-2"]
    roles = {settings.role for _, _, settings in nodes(engines)}
    assert roles == {"prefill", "decode"}


def test_every_address_is_of_a_service_that_listens_there(engines: str) -> None:
    settings = ours(engines)
    registries = tuple(
        f"{name}:{port}" for name in ("registry-1", "registry-2") for port in started.ports(settings[name])
    )
    for name, one in settings.items():
        if name.startswith("registry"):
            assert one.etcd_endpoints == ("etcd:2379",)
        else:
            assert one.registry == registries
    for name in ("router-1", "router-2"):
        published = {int(port.rsplit(":", 1)[1]) for port in stack(engines)[name]["ports"]}
        assert published == started.ports(settings[name])
        assert all(port.startswith("127.0.0.1:") for port in stack(engines)[name]["ports"]), "they ask for no key"


def test_an_agent_shares_its_engines_address_and_socket(engines: str) -> None:
    for name, engine, agent in nodes(engines):
        beside = stack(engines)[f"{name}-agent"]
        assert beside["network_mode"] == f"service:{name}"
        assert f"{name}:/run/backhaul" in engine["volumes"]
        assert f"{name}:/run/backhaul" in beside["volumes"]
        address = engine["networks"]["backhaul"]["ipv4_address"]
        assert agent.node == name
        assert agent.side_channel == f"{address}:5600"
        assert agent.advertised == f"{address}:7201"
        assert agent.advertised_engine_url == f"http://{address}:8000"
        assert "--port=8000" in engine["command"]


def test_engines_are_started_for_their_agents(engines: str) -> None:
    for _, engine, agent in nodes(engines):
        if program_of(engine) == "backhaul-simulator":
            options = started.simulator(engine["command"])
            told = (options.agent_socket, f"{options.side_channel_host}:{options.side_channel_port}", options.kv_events)
        else:
            flags = dict(flag.split("=", 1) for flag in engine["command"] if "=" in flag)
            env = engine["environment"]
            side = f"{env['VLLM_NIXL_SIDE_CHANNEL_HOST']}:{env['VLLM_NIXL_SIDE_CHANNEL_PORT']}"
            events = json.loads(flags.get("--kv-events-config", "{}")).get("endpoint", "")
            told = (env["BACKHAUL_AGENT_SOCKET"], side, events)
            assert json.loads(flags["--kv-transfer-config"])["kv_connector_module_path"] == "backhaul_connector"
            assert env["PYTHONPATH"] in [part for mount in engine["volumes"] for part in mount.split(":")]
        assert told == (agent.connector_socket, agent.side_channel, agent.kv_events.replace("127.0.0.1", "*"))


def test_images_are_built_from_their_dockerfiles(engines: str) -> None:
    for service in stack(engines).values():
        if "build" in service:
            folder = (FOLDER / service["build"]["context"]).resolve()
            assert folder == ROOT
            dockerfile = folder / service["build"]["dockerfile"]
            assert dockerfile.exists()
            assert image_name(service["image"]) == f"backhaul-{dockerfile.stem}"


def test_everything_that_stays_runs_without_rights(engines: str) -> None:
    for name, service in stack(engines).items():
        if name == "connector":
            continue
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("read_only", False) is (image_name(service["image"]) != "vllm-openai")
        assert image_name(service["image"]).startswith("backhaul-") or service["user"].split(":")[0] == "2000"


def test_services_have_time_to_end(engines: str) -> None:
    for name, settings in ours(engines).items():
        needed = {"router": lambda it: it.lame_duck_s + it.grace_s, "registry": lambda it: it.grace_s}.get(
            name.split("-")[0], lambda it: it.drain_s + 3
        )(settings)
        assert int(stack(engines)[name]["stop_grace_period"].removesuffix("s")) > needed
