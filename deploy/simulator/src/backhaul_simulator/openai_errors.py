"""Errors in OpenAI's form, as vLLM 0.32 words them (``entrypoints/serve/exception_handling``)."""

from typing import Any

_MALFORMED = "Bad Request"


class RefusedError(Exception):
    """The server answers with an error."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self._kind = kind
        self.document: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }

    def document_at(self, path: str) -> dict[str, Any]:
        """Returns it as it is said at a path.

        ``/v1/messages`` translates what its handler refuses, not what comes before that (``anthropic/api_router.py``).
        """
        if not path.startswith("/v1/messages") or self._kind == _MALFORMED:
            return self.document
        return {"type": "error", "error": {"type": self._kind, "message": str(self)}}


def malformed(message: str, param: str | None) -> RefusedError:
    """Returns the error for a body whose fields have the wrong types (``handlers/validation.py``)."""
    return RefusedError(f"1 validation error:\n  {message}", kind=_MALFORMED, param=param)


def not_valid(message: str, param: str | None = None, value: object = None) -> RefusedError:
    """Returns the error for a value that cannot be (``VLLMValidationError``)."""
    extras = [f"{name}={extra}" for name, extra in (("parameter", param), ("value", value)) if extra is not None]
    return RefusedError(f"{message} ({', '.join(extras)})" if extras else message, param=param)


def failed() -> RefusedError:
    """Returns the bare 500 of a request whose KV blocks could not be loaded: no reason is given.

    vLLM: ``_raise_if_error`` in ``entrypoints/generate/base/serving.py``.
    """
    return RefusedError("Internal server error", status=500, kind="InternalServerError")


def engine_dead() -> RefusedError:
    """Returns the error of a server whose engine has ended."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return RefusedError(message, status=500, kind="InternalServerError")
