"""The connector's real link and ledger at the agent's real socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import msgspec

from backhaul.agent.v1 import agent_pb2
from backhaul_connector.ledger import Ledger
from backhaul_connector.link import AgentLink
from tests.contract.owner_node import OwnerNode, owner_node
from tests.fakes.connector import hello, report
from tests.fakes.eventually import eventually


@contextmanager
def linked(node: OwnerNode) -> Iterator[Ledger]:
    """Connects a link as an engine does. Its clock is this process's own, as `time.perf_counter` shows it."""
    ledger = Ledger()
    greeting = hello(side_channel_port=node.side_channel.port)
    link = AgentLink(
        str(node.config.socket_path), ledger, lambda session: msgspec.structs.replace(greeting, last_session=session)
    )
    ledger._wake = link.wake
    link.start()
    try:
        yield ledger
    finally:
        link.stop()


async def test_a_set_goes_through_its_life_over_the_real_link(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node:
        with linked(node) as ledger:
            await node.ready()
            ledger.retained(report("set-1", deadline=perf_counter() + 480))
            await node.published()
            await node.claim()
            await eventually(lambda: ledger._sets["set-1"].claimed)
            await node.stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id="request-1"), timeout=2)
            await eventually(lambda: not ledger._sets["set-1"].claimed)
            await node.published()
            ledger.freed(["set-1"])
            await node.becomes(0)


async def test_what_happens_while_the_connection_is_cut_is_learnt_from_the_replay(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node:
        with linked(node) as ledger:
            await node.ready()
            ledger.retained(report("set-1", deadline=perf_counter() + 480))
            ledger.retained(report("set-2", deadline=perf_counter() + 480))
            await node.published("set-2")
            await node.claim("set-1")
            node.app._connectors.drop_connections()
            ledger.freed(["set-2"])
            ledger.retained(report("set-3", deadline=perf_counter() + 480))
            await node.published("set-3")
            await node.unpublished("set-2")
            assert await node.refusal("set-1", request_id="request-2") == "SET_CLAIMED"
            await node.claim("set-3", request_id="request-3")
