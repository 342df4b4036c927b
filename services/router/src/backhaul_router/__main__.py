"""Starts a router: ``backhaul-router --registry host:port``."""

import sys
from socket import gethostname

import uvloop

from backhaul_common.config import load_config
from backhaul_common.exposition import configure_metrics
from backhaul_common.logs import configure_logging
from backhaul_common.run import run_service
from backhaul_common.telemetry import configure_telemetry
from backhaul_router.app import serve
from backhaul_router.config import Config


def main() -> None:
    """Runs until a signal comes."""
    config = load_config(Config, prog="backhaul-router")
    configure_logging(config.log_level, "backhaul-router")
    with (
        configure_telemetry("backhaul-router"),
        configure_metrics("backhaul-router", gethostname(), wanted=bool(config.listen_metrics)) as measured,
    ):
        code = run_service(lambda stopping: serve(config, stopping, measured), loop_factory=uvloop.new_event_loop)
    sys.exit(code)


if __name__ == "__main__":
    main()
