"""The index as the agent's centre sees it: pointers to what is retained, and those to what is merely cached."""

from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.harvest import Harvest
from backhaul_node_agent.publishers import Publishers


class Index:
    """Publishes what the owner wants published, and keeps second chances in step with it."""

    def __init__(self, publishers: Publishers, harvest: Harvest) -> None:
        self._publishers = publishers
        self._harvest = harvest

    def open(self, engine_id: str) -> None:
        """Starts publishing for an engine, unless that has been done."""
        self._publishers.open(engine_id)

    def publish(self, engine_id: str, block_set: BlockSet) -> None:
        """Wants a set's pointers written; cached ones that it stands in for go."""
        self._publishers.publish(engine_id, block_set)
        self._harvest.retained(engine_id, block_set)

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None:
        """Wants a set's pointers removed."""
        self._publishers.unpublish(engine_id, block_set)

    def let_go(self, engine_id: str, block_set: BlockSet) -> None:
        """Leaves a cached pointer to a set that is retained no more."""
        self._harvest.let_go(engine_id, block_set)

    def forget(self, engine_id: str) -> None:
        """Ends all pointers of an engine."""
        self._harvest.forget(engine_id)
        self._publishers.forget(engine_id)

    def lease_lost(self) -> None:
        """Ends the pointers until the node has joined again."""
        self._publishers.lease_lost()
