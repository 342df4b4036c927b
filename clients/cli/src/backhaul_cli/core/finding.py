"""What a check says."""

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad it is."""

    ERROR = "error"
    """It stops reuse, on the subject or altogether."""
    WARNING = "warning"
    """It costs some of it, or will."""
    NOTE = "note"
    """Something could not be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, and what to do."""

    check: str
    """Which kind of fault; stable, for programs."""
    severity: Severity
    subject: str
    """What it is about: a node, a registry, etcd, a model."""
    what: str
    """What is wrong, and what follows from it."""
    fix: str
    """What to do."""


def error(check: str, subject: str, what: str, fix: str) -> Finding:
    """Returns a finding that stops reuse."""
    return Finding(check=check, severity=Severity.ERROR, subject=subject, what=what, fix=fix)


def warning(check: str, subject: str, what: str, fix: str) -> Finding:
    """Returns a finding that costs reuse."""
    return Finding(check=check, severity=Severity.WARNING, subject=subject, what=what, fix=fix)


def note(check: str, subject: str, what: str, fix: str) -> Finding:
    """Returns a finding about what could not be looked at."""
    return Finding(check=check, severity=Severity.NOTE, subject=subject, what=what, fix=fix)
