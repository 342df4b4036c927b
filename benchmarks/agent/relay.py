"""Takes notifications over NIXL itself and passes them on to a simulated engine, which only knows the stand-in.

It answers the engine's handshake with metadata of its own, so that an agent speaks NIXL as it would to a real engine.
``python -m benchmarks.agent.relay PORT ENGINE_HOST:PORT``
"""

import asyncio
import importlib
import sys
from collections.abc import Sequence

import msgspec
import zmq.asyncio

from backhaul_common.addresses import split_address
from backhaul_local.ports import HOST
from backhaul_node_agent.engine_probe import HandshakeReply, SideChannel, SideChannelError
from backhaul_node_agent.nixl_notifier import NixlAgent
from backhaul_simulator.notifications import nixl_agent
from backhaul_simulator.side_channel import HandshakeListener, NixlAgentMetadata, NixlHandshakePayload

_LOOK_S = 0.02
"""How often an engine that only retains looks for notifications (``backhaul_simulator.engine``)."""
_ASK_AGAIN_S = 0.2


async def _relay(port: int, engine: str) -> None:
    api = importlib.import_module("nixl._api")
    own = api.nixl_agent("relay", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    reply = await _shake_hands(*split_address(engine))
    towards = nixl_agent("relay")
    name = towards.add_remote_agent(reply.agent_metadata)
    listener = HandshakeListener(HOST, port, _payload(reply, own.get_agent_metadata()))
    try:
        await _pass_on(own, towards, name)
    finally:
        listener.stop()


async def _shake_hands(host: str, port: int) -> HandshakeReply:
    """Asks the engine until it answers."""
    with zmq.asyncio.Context() as context:
        while True:
            try:
                return await SideChannel(context).ask(host, port)
            except SideChannelError:
                await asyncio.sleep(_ASK_AGAIN_S)


def _payload(reply: HandshakeReply, agent_metadata: bytes) -> NixlHandshakePayload:
    facts = reply.facts
    told = NixlAgentMetadata(facts.engine_id, agent_metadata, facts.block_count, facts.block_size, transfer_port=0)
    return NixlHandshakePayload(facts.compatibility_hash, msgspec.msgpack.encode(told))


async def _pass_on(own: NixlAgent, towards: nixl_agent, name: str) -> None:
    while True:
        for messages in own.get_new_notifs().values():
            for message in messages:
                towards.send_notif(name, message)
        await asyncio.sleep(_LOOK_S)


def main(arguments: Sequence[str]) -> None:
    """Relays until it is ended."""
    port, engine = arguments
    asyncio.run(_relay(int(port), engine))


if __name__ == "__main__":
    main(sys.argv[1:])
