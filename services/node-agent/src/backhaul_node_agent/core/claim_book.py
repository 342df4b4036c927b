"""Request ids of claims: which are live, and which came back."""

from dataclasses import dataclass, field

MAX_RETURNED = 10_000
"""Returned ids remembered at most. The oldest is forgotten first: a claim that arrives after its own forgotten return
is granted to a router that will not use it, and lapses."""


@dataclass(frozen=True, slots=True)
class SetName:
    """A block set of one engine incarnation."""

    engine_id: str
    set_id: str


@dataclass(slots=True)
class ClaimBook:
    """Makes claims and returns idempotent by their request id."""

    ttl_s: float
    """How long a returned id is remembered."""
    _live: dict[str, SetName] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)
    """Live ids of which a router has been told."""
    # Insertion order is order of expiry, since every id is kept equally long.
    _returned: dict[str, float] = field(default_factory=dict)

    def holder(self, request_id: str) -> SetName | None:
        """Returns what the id has claimed, while the claim lives."""
        return self._live.get(request_id)

    def add(self, request_id: str, name: SetName) -> None:
        """Notes a grant."""
        self._live[request_id] = name

    def drop(self, request_id: str) -> None:
        """Notes the end of a grant."""
        self._live.pop(request_id, None)
        self._answered.discard(request_id)

    def mark_answered(self, request_id: str) -> None:
        """Notes that the router is told of its grant."""
        self._answered.add(request_id)

    def answered(self, request_id: str) -> bool:
        """Tells whether the router was told of its grant, on whichever call."""
        return request_id in self._answered

    def mark_returned(self, request_id: str, now: float) -> None:
        """Remembers a return, whether or not its claim has come yet."""
        self._returned.pop(request_id, None)
        self._returned[request_id] = now + self.ttl_s
        if len(self._returned) > MAX_RETURNED:
            del self._returned[next(iter(self._returned))]

    def returned(self, request_id: str, now: float) -> bool:
        """Tells whether a return with this id came within the last `ttl_s`."""
        return self._returned.get(request_id, now) > now

    def expire(self, now: float) -> None:
        """Forgets returns that are old enough."""
        while self._returned:
            oldest = next(iter(self._returned))
            if self._returned[oldest] > now:
                return
            del self._returned[oldest]
