"""Keepalive pings of idle clients."""

import asyncio

import pytest

from backhaul_common import grpc_client, grpc_server
from backhaul_common.etcd import EtcdClient, EtcdOptions, Get
from backhaul_common.etcd import connection as etcd_connection
from tests.fakes.etcd_process import EtcdProcess

Options = tuple[tuple[str, int], ...]


def faster(options: Options, *names: str) -> Options:
    """Divides some intervals by ten, so that what takes a minute takes seconds."""
    assert set(names) <= {name for name, _ in options}
    return tuple((name, value // 10 if name in names else value) for name, value in options)


async def test_a_client_that_pings_without_calls_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = "grpc.http2.min_ping_interval_without_data_ms"
    monkeypatch.setattr(grpc_server, "_OPTIONS", faster(grpc_server._OPTIONS, interval))
    monkeypatch.setattr(grpc_client, "CHANNEL_OPTIONS", faster(grpc_client.CHANNEL_OPTIONS, "grpc.keepalive_time_ms"))
    server = grpc_server.GrpcServer(address="127.0.0.1:0", service_names=())
    async with server, grpc_client.open_channel(f"127.0.0.1:{server.port}") as channel:
        await channel.channel_ready()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(6):
                await channel.wait_for_state_change(channel.get_state())


@pytest.mark.etcd
async def test_an_idle_connection_to_etcd_stays_connected(
    shared_etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_connection, "_OPTIONS", faster(etcd_connection._OPTIONS, "grpc.keepalive_time_ms"))
    async with EtcdClient(EtcdOptions(endpoints=(shared_etcd.endpoint,))) as client:
        await client.range(Get(b"/idle"))
        channel = client._connection.channel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(6):
                await channel.wait_for_state_change(channel.get_state())
