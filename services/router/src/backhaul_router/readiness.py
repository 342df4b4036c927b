"""Whether this router should be given traffic. Liveness is another question."""

from backhaul_router.core.nodes import NodeTable


class Readiness:
    """Ready while a usable pair of nodes exists and the router is not stopping."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._stopping = False

    def stop(self) -> None:
        """The router is stopping."""
        self._stopping = True

    def problem(self) -> str:
        """Returns why the router is not ready; empty when it is."""
        return "stopping" if self._stopping else self._table.problem()
