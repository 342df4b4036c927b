"""Errors in OpenAI's form, as vLLM 0.32 words them (``entrypoints/serve/exception_handling``)."""

from typing import Any


class RefusedError(Exception):
    """The server answers with an error."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.document: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }


def malformed(message: str, param: str | None) -> RefusedError:
    """Returns the error for a body whose fields have the wrong types (``handlers/validation.py``)."""
    return RefusedError(f"1 validation error:\n  {message}", kind="Bad Request", param=param)


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
