"""What the simulated engines themselves counted: they know what was read, and whether it was the right thing."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

_TIMEOUT_S = 1
FORBIDDEN = ("second_reads", "wrong_reads_used")
"""Counters that must stay 0. A late read may meet freed blocks: then the end fence must not let it be used."""


class Ledgers:
    """The counts of all engine incarnations that were seen, the last of each."""

    def __init__(self) -> None:
        self._by_engine: dict[str, dict[str, Any]] = {}

    def collect(self, urls: Iterable[str]) -> list[dict[str, Any]]:
        """Asks the servers at these base URLs and returns what their ranks say.

        One that does not answer keeps what it said before.
        """
        ranks = []
        for url in urls:
            try:
                with urllib.request.urlopen(f"{url}/simulator/ledger", timeout=_TIMEOUT_S) as response:
                    document = json.load(response)
            except (urllib.error.URLError, OSError, ValueError):
                continue
            for rank in document["ranks"]:
                self._by_engine[rank["engine_id"]] = rank
                ranks.append(rank)
        return ranks

    def forbidden(self) -> dict[str, int]:
        """Returns the counters that must be 0 and are not."""
        counts = self.counts()
        return {name: counts[name] for name in FORBIDDEN if counts[name]}

    def counts(self) -> dict[str, int]:
        """Returns the counters, summed over all incarnations."""
        ranks = self._by_engine.values()
        reads = {
            f"{kind}_reads_{name}": sum(rank["reads"][kind][name] for rank in ranks)
            for kind in ("claimed", "handoff")
            for name in ("started", "completed", "failed")
        }
        names = (*FORBIDDEN, "reads_of_freed", "late_reads_failed", "preemptions")
        return {**{name: sum(rank[name] for rank in ranks) for name in names}, **reads}

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """All that was said, one document per incarnation."""
        return list(self._by_engine.values())
