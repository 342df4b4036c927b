"""The limit on open files, which sockets are."""

import resource


def allow_open_files(needed: int) -> int:
    """Raises the process's soft limit to ``needed`` where it is lower; returns how many of them are allowed then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
