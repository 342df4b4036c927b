"""Errors that cross module and process borders.

    BackhaulError
    ├── InvalidArgumentError      the request is wrong, whatever the state
    ├── UnauthenticatedError      credentials are missing or wrong
    ├── PermissionDeniedError     the caller is known, and may not do this
    ├── NotFoundError             the thing does not exist
    ├── AlreadyExistsError        somebody else has it
    ├── FailedPreconditionError   the state does not allow it; repeating alone does not help
    ├── AbortedError              a larger unit must start over (a stream, a transaction)
    ├── ResourceExhaustedError    a limit is reached
    ├── UnavailableError          not now; an idempotent call may be repeated
    ├── DeadlineExceededError     no answer in time; the effect is unknown
    └── InternalError             a fault of ours

Every error says why in ``reason`` (UPPER_SNAKE, stable, for programs) and in ``message`` (for people), and with which
values in ``metadata``. Nothing here may carry secrets, prompts or keys.
"""


class BackhaulError(Exception):
    """Base of all errors that Backhaul raises on purpose."""

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message
        self.metadata = metadata

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})"


class InvalidArgumentError(BackhaulError):
    """The request is wrong, whatever the state."""


class UnauthenticatedError(BackhaulError):
    """Credentials are missing or wrong."""


class PermissionDeniedError(BackhaulError):
    """The caller is known, and may not do this."""


class NotFoundError(BackhaulError):
    """The thing does not exist."""


class AlreadyExistsError(BackhaulError):
    """Somebody else has it."""


class FailedPreconditionError(BackhaulError):
    """The state does not allow it."""


class AbortedError(BackhaulError):
    """A larger unit (a stream, a transaction) must start over."""


class ResourceExhaustedError(BackhaulError):
    """A limit is reached."""


class UnavailableError(BackhaulError):
    """Not now; an idempotent call may be repeated."""


class DeadlineExceededError(BackhaulError):
    """No answer in time; the effect is unknown."""


class InternalError(BackhaulError):
    """A fault of ours."""
