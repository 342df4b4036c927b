"""What processes hold in memory."""

import os
from pathlib import Path


def rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process. Linux only."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
