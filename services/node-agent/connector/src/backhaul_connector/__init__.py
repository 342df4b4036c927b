"""vLLM KV connector that reports what an engine retains and verifies what it reads.

vLLM loads it with ``"kv_connector": "NixlConnector", "kv_connector_module_path": "backhaul_connector"`` and looks the
class up by that name (``kv_connector/factory.py``: several places of vLLM compare the connector's name). The modules
``anchors`` and ``wire`` import nothing of vLLM: the router and the agent use them too.
"""

from typing import Any

__version__ = "0.1.0"

SUPPORTED_VLLM = "0.32.0"
"""The vLLM release whose hooks the connector was read and tested against. Any other one gets vLLM's own connector."""


def __getattr__(name: str) -> Any:
    """Imports the connector on first use, so that ``anchors`` and ``wire`` work where vLLM is not installed."""
    if name != "NixlConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    if vllm.__version__.split("+")[0] == SUPPORTED_VLLM:
        from backhaul_connector import connector

        found: Any = connector.NixlConnector
    else:
        found = _stock_connector(vllm.__version__)
    globals()[name] = found
    return found


def _stock_connector(vllm_version: str) -> Any:
    import logging

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    logging.getLogger("vllm.backhaul").warning(
        "Backhaul: vLLM %s is not supported (only %s): using vLLM's own NixlConnector, without reuse",
        vllm_version,
        SUPPORTED_VLLM,
    )
    return KVConnectorFactory.get_connector_class_by_name("NixlConnector")
