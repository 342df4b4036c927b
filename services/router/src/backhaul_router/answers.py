"""From the decode engine's answer to the client's."""

from collections.abc import Mapping

from backhaul_router.core.engines import EngineError
from backhaul_router.core.errors import ApiError
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.legs import without_params
from backhaul_router.core.turn import Outcome
from backhaul_router.ports import Answer, Stream


async def answer_to(outcome: Outcome, stream: Stream) -> Answer:
    """Returns a stream as it is, everything else whole and without handles.

    Raises ApiError (502, 504) when the engine stops before the end.
    """
    status = stream.status
    if status >= 400:
        outcome.result = "refused" if status < 500 else "failed"
    headers = {**_passed_on(stream.headers), **outcome.headers}
    if status == 200 and stream.headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(status, headers, outcome, None, stream)
    try:
        return Answer(status, headers, outcome, without_params(await stream.read()), None)
    except EngineError as error:
        raise error.as_api_error("decode") from error
    except ValueError as error:
        raise ApiError(502, "the decode engine's answer is not valid") from error


class Labelled:
    """Remembers a turn's key while its answer goes out, and for a moment after; forgets it when it breaks."""

    def __init__(self, fresh: FreshKeys, scope: str, key: str, outcome: Outcome, stream: Stream) -> None:
        self._fresh = fresh
        self._scope = scope
        self._key = key
        self._outcome = outcome
        self._stream = stream

    def __enter__(self) -> None:
        if self._key:
            self._fresh.note(self._scope, self._key)

    def __exit__(self, exc_type: type[BaseException] | None, exc: object, traceback: object) -> None:
        if exc_type is None and not self._stream.complete:
            self._outcome.result = "broken"
        if self._key:
            renew = self._fresh.note if self._stream.complete else self._fresh.forget
            renew(self._scope, self._key)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of an engine's answer that mean something to the client."""
    lower = {name.lower(): value for name, value in headers.items()}
    return {
        name: value
        for name, value in lower.items()
        if name in ("content-type", "retry-after") or name.startswith("x-ratelimit-")
    }
