"""`GET /v1/models`: the union of what live engines say."""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from backhaul_router.core.engines import EngineError
from backhaul_router.core.errors import ApiError
from backhaul_router.core.nodes import Node, NodeTable


class ModelSource(Protocol):
    """Engines that list their models."""

    async def models(self, url: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Raises EngineError, or ApiError when the engine blames the client."""
        ...


class Models:
    """Asks all usable engines at once."""

    def __init__(self, source: ModelSource, table: NodeTable) -> None:
        self._source = source
        self._table = table

    async def document(self, headers: Mapping[str, str]) -> bytes:
        """Returns OpenAI's list, each entry as its first engine (by node id) reports it.

        Raises ApiError: an engine's own when all that answer refuse, 503 when none answers.
        """
        nodes = sorted((node for node in self._table if node.usable), key=lambda node: node.node_id)
        answers = await asyncio.gather(*(self._of(node, headers) for node in nodes))
        refusals = [answer for answer in answers if isinstance(answer, ApiError)]
        lists = [answer for answer in answers if not isinstance(answer, ApiError)]
        entries: dict[str, dict[str, Any]] = {}
        for entry in (entry for answer in lists for entry in answer):
            entries.setdefault(str(entry.get("id")), entry)
        if not entries:
            raise refusals[0] if refusals else ApiError(503, "no engine is ready", headers={"retry-after": "1"})
        return msgspec.json.encode({"object": "list", "data": list(entries.values())})

    async def _of(self, node: Node, headers: Mapping[str, str]) -> list[dict[str, Any]] | ApiError:
        try:
            return await self._source.models(f"{node.engine_url}/v1/models", headers)
        except EngineError:
            return []
        except ApiError as refusal:
            return refusal
