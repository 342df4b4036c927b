"""Which engines were given a leg last, so that equal ones can take turns."""

from collections.abc import Collection

from backhaul_router.core.routing.target import Target, TargetKey


class Recency:
    """The order of picks. Only legs that are sent count: a plan that loses to a faster route is nobody's turn."""

    def __init__(self) -> None:
        self._picked: dict[TargetKey, int] = {}
        """When each engine was picked last, as the number of the pick."""
        self._picks = 0

    @property
    def picks(self) -> int:
        """Picks so far."""
        return self._picks

    def picked(self, target: Target) -> None:
        """A leg goes to this engine."""
        self._picks += 1
        self._picked[target.key] = self._picks

    def last(self, key: TargetKey) -> int:
        """Returns the number of an engine's last pick; 0 when it had none."""
        return self._picked.get(key, 0)

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these."""
        self._picked = {key: pick for key, pick in self._picked.items() if key[0] in node_ids}
