"""Starts the node agent: ``backhaul-node-agent --help``."""

import sys
from collections.abc import Sequence

import structlog

from backhaul_common.config import load_config
from backhaul_common.exposition import configure_metrics
from backhaul_common.logs import configure_logging
from backhaul_common.run import run_service
from backhaul_common.telemetry import configure_telemetry
from backhaul_node_agent.app import App
from backhaul_node_agent.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the agent until it is told to stop; returns the exit code."""
    config = load_config(Config, prog="backhaul-node-agent", argv=argv)
    configure_logging(config.log_level, "backhaul-node-agent")
    structlog.get_logger(__name__).info("starting", settings=config.model_dump(mode="json"))
    with (
        configure_telemetry("backhaul-node-agent"),
        configure_metrics("backhaul-node-agent", config.node, wanted=bool(config.listen_metrics)) as measured,
    ):
        return run_service(lambda stopping: App(config, measured=measured).run(stopping))


if __name__ == "__main__":
    sys.exit(main())
