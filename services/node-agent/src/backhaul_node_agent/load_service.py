"""gRPC face of the engines' load: `LoadService`."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_node_agent import convert
from backhaul_node_agent.load_watch import LoadWatch

SERVICE_NAME = agent_pb2.DESCRIPTOR.services_by_name["LoadService"].full_name


class LoadServicer(agent_pb2_grpc.LoadServiceServicer):
    """Passes on what there is to tell."""

    def __init__(self, watch: LoadWatch) -> None:
        self._watch = watch

    async def WatchLoad(
        self,
        request: agent_pb2.WatchLoadRequest,
        context: grpc.aio.ServicerContext[agent_pb2.WatchLoadRequest, agent_pb2.WatchLoadResponse],
    ) -> AsyncIterator[agent_pb2.WatchLoadResponse]:
        async with aclosing(self._watch.watch()) as news:
            async for loads in news:
                yield convert.load_response(loads)
