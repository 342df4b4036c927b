"""vLLM KV connector that reports what an engine retains and verifies what it reads.

vLLM loads it with ``"kv_connector": "NixlConnector", "kv_connector_module_path": "backhaul_connector"`` and looks the
class up by that name (``kv_connector/factory.py``: several places of vLLM compare the connector's name). The modules
``anchors`` and ``wire`` import nothing of vLLM: the router and the agent use them too.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the connector on first use, so that ``anchors`` and ``wire`` work where vLLM is not installed."""
    if name == "NixlConnector":
        from backhaul_connector.connector import NixlConnector

        return NixlConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
