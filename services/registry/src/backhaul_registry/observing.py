"""What the registry counts of etcd, and what is read of its parts whenever metrics are."""

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from backhaul_common.metering import OTHER, Histogram, Values, observe
from backhaul_registry import instruments
from backhaul_registry.availability import Availability
from backhaul_registry.condition import Condition
from backhaul_registry.core.model import Node, NodeState, Pointer
from backhaul_registry.hub import Hub

_FAILURES: Mapping[type[BackhaulError], str] = {
    AbortedError: "aborted",
    DeadlineExceededError: "deadline_exceeded",
    FailedPreconditionError: "failed_precondition",
    UnavailableError: "unavailable",
}


class EtcdCalls:
    """Counts calls of etcd by how long they take."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._durations = Histogram(instruments.ETCD_DURATION)

    @contextmanager
    def measured(self, operation: str) -> Iterator[None]:
        """Measures what is done inside."""
        began, failure = self._monotonic(), ""
        try:
            yield
        except asyncio.CancelledError:
            failure = "cancelled"
            raise
        except BackhaulError as error:
            failure = _FAILURES.get(type(error), OTHER)
            raise
        finally:
            self._durations.record(self._monotonic() - began, "etcd", operation, failure)


def observe_etcd(availability: Availability, condition: Condition) -> None:
    """Has it looked at how etcd is whenever metrics are read."""
    observe(instruments.ETCD_AVAILABLE, lambda: {(): availability.available})
    observe(instruments.ETCD_FULL, lambda: {(): condition.full})
    observe(instruments.ETCD_CORRUPT, lambda: {(): condition.corrupt})


def observe_watches(nodes: Hub[Node], pointers: Hub[Pointer]) -> None:
    """Has the hubs, and the nodes that have joined, looked at whenever metrics are read."""

    def of_each(read: Callable[[Hub[Any]], float]) -> Callable[[], Values]:
        return lambda: {(instruments.NODES_WATCH,): read(nodes), (instruments.POINTERS_WATCH,): read(pointers)}

    def states() -> Values:
        counts = Tally(node.state for node in nodes.items.values())
        return {(instruments.state_label(state),): counts[state] for state in NodeState}

    observe(instruments.WATCH_FOLLOWS, of_each(lambda hub: hub.following))
    observe(instruments.WATCH_BREAKS, of_each(lambda hub: hub.break_count))
    observe(instruments.WATCHERS, of_each(lambda hub: hub.watcher_count))
    observe(instruments.NODES, states)
