"""What the simulated engines themselves counted: they know what was read, and whether it was the right thing."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

_TIMEOUT_S = 5
FORBIDDEN = ("second_reads", "wrong_reads_used")
"""Counters that must stay 0. A late read may meet freed blocks: then the end fence must not let it be used."""


class Ledgers:
    """The counts of all engine incarnations that were seen, the last of each."""

    def __init__(self) -> None:
        self._by_engine: dict[str, dict[str, Any]] = {}

    def collect(self, urls: Iterable[str]) -> None:
        """Asks the servers at these base URLs; one that does not answer keeps what it said before."""
        for url in urls:
            try:
                with urllib.request.urlopen(f"{url}/simulator/ledger", timeout=_TIMEOUT_S) as response:
                    document = json.load(response)
            except (urllib.error.URLError, OSError, ValueError):
                continue
            for rank in document["ranks"]:
                self._by_engine[rank["engine_id"]] = rank

    def total(self, name: str) -> int:
        """Returns a counter, summed over all incarnations."""
        return sum(int(rank[name]) for rank in self._by_engine.values())

    def forbidden(self) -> dict[str, int]:
        """Returns the counters that must be 0."""
        return {name: self.total(name) for name in FORBIDDEN}

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """All that was said, one document per incarnation."""
        return list(self._by_engine.values())
