"""A gRPC servicer of which only some methods are written."""

from typing import Any

import grpc


class Partial:
    """Answers UNIMPLEMENTED where a subclass has no method; pass it to ``add_..._to_server`` as Any."""

    def __getattr__(self, name: str) -> Any:
        async def unimplemented(request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, name)

        return unimplemented
