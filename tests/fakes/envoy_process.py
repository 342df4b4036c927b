"""A real Envoy in front of one router, with the configurations of deploy/envoy."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from backhaul_local.envoy import EnvoyAddresses, envoy_binary, envoy_spec
from backhaul_local.ports import HOST, Ports
from tests.fakes.eventually import eventually

ROOT = Path(__file__).parents[2]

_FILTERS = "          http_filters:\n"


def in_pieces(config: str) -> str:
    """Has request bodies sent as they come."""
    return config.replace("request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED")


def both_in_pieces(config: str) -> str:
    """Has both bodies sent as they come, as gateways do by default."""
    return in_pieces(config).replace("response_body_mode: NONE", "response_body_mode: FULL_DUPLEX_STREAMED")


def with_trailers(config: str) -> str:
    """Has trailers of HTTP/1.1 requests taken as such; by default Envoy drops them."""
    prefix = "          stat_prefix: openai\n"
    return config.replace(prefix, f"{prefix}          http_protocol_options: {{enable_trailers: true}}\n")


def limited_to(*endpoints: str) -> Callable[[str], str]:
    """Has the gateway name the endpoints that may be picked."""
    filter_ = f"""          - name: envoy.filters.http.set_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: envoy.lb.subset_hint
                value: {{x-gateway-destination-endpoint-subset: [{", ".join(f'"{one}"' for one in endpoints)}]}}
"""
    return lambda config: config.replace(_FILTERS, _FILTERS + filter_)


@asynccontextmanager
async def envoy(
    folder: Path, *, http_port: int, picker_port: int, change: Callable[[str], str] = lambda config: config
) -> AsyncIterator[str]:
    """Runs Envoy until left; yields its base URL. ``change`` is applied to its configuration."""
    ports = Ports()
    listen, admin = f"{HOST}:{ports.take()}", f"{HOST}:{ports.take()}"
    addresses = EnvoyAddresses(
        listen=listen, admin=admin, routers=[f"{HOST}:{http_port}"], pickers=[f"{HOST}:{picker_port}"]
    )
    file = folder / "envoy.yaml"
    spec = envoy_spec(addresses, file)
    file.write_text(change(file.read_text()))
    async with _running(folder, spec.command, listen) as url:
        yield url


@asynccontextmanager
async def transcoder(
    folder: Path, *, grpc_port: int, change: Callable[[str], str] = lambda config: config
) -> AsyncIterator[str]:
    """Runs Envoy as a transcoder until left; yields its base URL. ``change`` is applied to its configuration."""
    ports = Ports()
    listen, admin = ports.take(), ports.take()
    config = (ROOT / "deploy" / "envoy" / "transcoder.yaml").read_text()
    for old, new in {"8000": listen, "9901": admin, "8081": grpc_port}.items():
        assert config.count(f"port_value: {old}") == 1
        config = config.replace(f"port_value: {old}", f"port_value: {new}")
    file = folder / "transcoder.yaml"
    file.write_text(change(config.replace("proto/gen/", f"{ROOT}/proto/gen/")))
    command = [str(envoy_binary()), "--config-path", str(file), "--log-level", "warning"]
    async with _running(folder, [*command, "--concurrency", "1", "--disable-hot-restart"], f"{HOST}:{listen}") as url:
        yield url


@asynccontextmanager
async def _running(folder: Path, command: Sequence[str], listen: str) -> AsyncIterator[str]:
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        await eventually(lambda: _listens(listen, process), timeout_s=30)
        yield f"http://{listen}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listens(address: str, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "it has ended: see envoy.log"
    host, port = address.split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
