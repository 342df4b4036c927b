"""Turns whose answer goes out as a gRPC stream."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

from backhaul_router.admission import Admission
from backhaul_router.core.errors import engine_answer
from backhaul_router.grpc_requests import Context, as_statuses, left_s
from backhaul_router.ports import Answer, TurnRequest
from backhaul_router.turns import Turns

_CHUNK_BYTES = 1024 * 1024
"""Longest chunk: clients need no larger messages than gRPC's default of 4 MiB allows."""

_OURS = "x-backhaul-"


class GrpcStreams:
    """Runs turns, and says with the call's initial metadata how each is served."""

    def __init__(self, turns: Turns, admission: Admission) -> None:
        self._turns = turns
        self._admission = admission

    @asynccontextmanager
    async def answered(self, turn: TurnRequest, context: Context) -> AsyncIterator[Answer]:
        """Runs one turn; entered when something of a good answer is there. Raises BackhaulError."""
        with as_statuses():
            admitted = self._admission.turn(turn.tenant, left_s=left_s(context), byte_count=len(turn.body))
            async with admitted, self._turns.run(turn) as answer:
                if answer.status >= 400:
                    raise engine_answer(answer.status, answer.body or b"", answer.headers)
                ours = [(name, value) for name, value in answer.headers.items() if name.startswith(_OURS)]
                await context.send_initial_metadata(ours)
                yield answer


async def chunks_of(answer: Answer) -> AsyncGenerator[bytes]:
    """Yields an answer in chunks that any client takes. Raises EngineError."""
    if answer.stream is None:
        for piece in cut(answer.body or b""):
            yield piece
        return
    async with aclosing(answer.stream.chunks()) as chunks:
        async for chunk in chunks:
            for piece in cut(chunk):
                yield piece


def cut(data: bytes) -> Iterator[bytes]:
    """Returns bytes in chunks that any client takes."""
    return (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
