"""The limit on open files, which sockets are."""

import resource

import structlog

_log = structlog.get_logger(__name__)


def allow_open_files(needed: int) -> None:
    """Raises the process's soft limit to ``needed`` where it is lower; warns when the hard limit does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _log.warning(
            "limit on open files too low",
            allowed=allowed,
            needed=needed,
            what_to_do="raise it (LimitNOFILE=, ulimit -Hn), or lower max_turns and max_connections",
        )
