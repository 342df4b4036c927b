"""Starts the registry."""

import sys
from socket import gethostname

import structlog

from backhaul_common.config import load_config
from backhaul_common.exposition import configure_metrics
from backhaul_common.logs import configure_logging
from backhaul_common.run import run_service
from backhaul_common.telemetry import configure_telemetry
from backhaul_registry.app import run
from backhaul_registry.config import Config

_NAME = "backhaul-registry"


def main() -> int:
    """Runs the registry from flags, environment and file; returns the exit code."""
    config = load_config(Config, prog=_NAME)
    configure_logging(config.log_level, _NAME)
    structlog.get_logger(__name__).info("starting", settings=config.model_dump(mode="json"))
    with (
        configure_telemetry(_NAME),
        configure_metrics(_NAME, gethostname(), wanted=bool(config.listen_metrics)) as measured,
    ):
        return run_service(lambda stopping: run(config, stopping, measured=measured))


if __name__ == "__main__":
    sys.exit(main())
