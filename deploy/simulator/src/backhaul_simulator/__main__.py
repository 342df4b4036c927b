"""Command line: one simulated vLLM server."""

import argparse
import asyncio
import logging
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace

from backhaul_simulator import clock, stand_in
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.tokens import TEMPLATES

_DEFAULTS = EngineOptions(connector=False)

_NUMBERS = (
    ("block_size", "TOKENS", "tokens per block"),
    ("block_count", "N", "blocks of each rank's memory; one of them is never used, as in vLLM"),
    ("max_model_len", "TOKENS", "longest prompt and answer together"),
    ("max_running", "N", "requests that run at once on a rank"),
    ("max_step_tokens", "TOKENS", "tokens that one step computes at most"),
    ("prefill_tokens_per_s", "RATE", "speed of prefill; 0: as fast as this machine can"),
    ("decode_step_s", "S", "duration of a step that decodes; 0: as fast as this machine can"),
    ("transfer_block_s", "S", "time that reading one block of another engine takes besides the copy"),
    ("ttl_s", "S", "how long the blocks of a finished turn are retained (decoder_kv_blocks_ttl)"),
    ("lease_s", "S", "kv_lease_duration: how long hand-offs are kept, and what a renewal is measured by"),
    ("recompute_threshold", "TOKENS", "fewer tokens than this are computed rather than read (kv_recompute_threshold)"),
    ("min_verified", "TOKENS", "fewest proved tokens for which the connector uses a handle (backhaul_min_verified)"),
    ("max_queued", "N", "messages of the connector that wait for its agent at most (backhaul_max_queued)"),
    ("vocabulary", "N", "number of token ids"),
    ("end_rate", "N", "about one generated token in so many ends the turn"),
    ("clock_offset_s", "S", "added to this process's perf_counter, by which engines measure deadlines"),
    ("clock_rate_ppm", "PPM", "how much faster this process's perf_counter runs, in millionths"),
    ("advertised_side_channel_port", "PORT", "port that others are told instead, for a proxy in between; 0: the same"),
    ("notification_port", "PORT", "port at which rank 0 takes notifications, rank n n ports higher; 0: any"),
    ("advertised_notification_port", "PORT", "port that senders are told instead, for a proxy in between; 0: the same"),
    ("transfer_port", "PORT", "port at which rank 0's blocks are read, rank n's n ports higher; 0: any"),
    ("advertised_transfer_port", "PORT", "port that readers are told instead, for a proxy in between; 0: the same"),
)

_SWITCHES = (
    ("bidirectional", "bidirectional_kv_xfer; without it turns retain nothing, and what is promised is never read"),
    ("async_scheduling", "plan a step before the last one's tokens are known"),
    ("connector", "Backhaul's connector; without it vLLM's own NixlConnector"),
)

_SSL = (
    ("ssl_certfile", "certificate of the server: HTTPS with it"),
    ("ssl_keyfile", "its key"),
    ("ssl_ca_certs", "CA of clients' certificates"),
)

_TEXTS = ("agent_socket", "model", "weights")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backhaul-simulator",
        description="A vLLM-compatible server without a model, on which Backhaul's connector runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on for HTTP")
    parser.add_argument("--port", type=int, default=8200, help="port to listen on for HTTP")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks, an engine each")
    parser.add_argument(
        "--first-rank",
        type=int,
        default=0,
        metavar="N",
        help="data-parallel rank of the first engine, where other servers have the ranks before; requests count from 0",
    )
    parser.add_argument(
        "--stock-ranks",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help="ranks that run vLLM's own NixlConnector, whatever the others do",
    )
    parser.add_argument("--api-key", default="", help="key that clients must bring; none by default")
    parser.add_argument(
        "--store-responses", action="store_true", help="keep responses, as with VLLM_ENABLE_RESPONSES_API_STORE=1"
    )
    parser.add_argument(
        "--side-channel",
        default="127.0.0.1:5600",
        metavar="HOST:PORT",
        help="NIXL side channel of rank 0, rank n's n ports higher; peers reach all of the engine at HOST",
    )
    parser.add_argument("--agent-socket", default="", metavar="PATH", help="Unix socket of the node agent")
    parser.add_argument("--model", default=_DEFAULTS.model, metavar="NAME", help="name of the model that is served")
    parser.add_argument(
        "--weights", default=_DEFAULTS.weights, metavar="NAME", help="engines with other weights give other answers"
    )
    parser.add_argument(
        "--kv-events",
        default="",
        metavar="tcp://*:PORT",
        help="where rank 0 publishes KV events, rank n n ports higher",
    )
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        default=_DEFAULTS.template,
        help="what of a chat's history becomes prompt: all, all but what earlier answers thought, the last message",
    )
    for name, text in _SSL:
        parser.add_argument(_flag(name), default="", metavar="FILE", help=text)
    parser.add_argument("--ssl-cert-reqs", type=int, default=0, choices=[0, 2], help="2: clients need a certificate")
    for name, metavar, text in _NUMBERS:
        default = getattr(_DEFAULTS, name)
        parser.add_argument(_flag(name), type=type(default), default=default, metavar=metavar, help=text)
    for name, text in _SWITCHES:
        default = getattr(_DEFAULTS, name) if name != "connector" else True
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=default, help=text)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _options(arguments: argparse.Namespace) -> EngineOptions:
    """Raises ValueError that says what is wrong."""
    host, _, port = arguments.side_channel.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--side-channel takes HOST:PORT, got {arguments.side_channel!r}")
    if arguments.connector and not arguments.agent_socket:
        raise ValueError("--agent-socket says where the node agent listens; without an agent, use --no-connector")
    if arguments.ranks < 1 or arguments.first_rank < 0:
        raise ValueError(
            f"--ranks must be at least 1 and --first-rank at least 0, got {arguments.ranks} and {arguments.first_rank}"
        )
    return EngineOptions(
        side_channel_host=host,
        side_channel_port=int(port),
        **{name: getattr(arguments, name) for name, _, _ in _NUMBERS},
        **{
            name: getattr(arguments, name)
            for name in ("agent_socket", "kv_events", "model", "template", "weights", "bidirectional", "connector")
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        options = _options(arguments)
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    clock.install(offset_s=options.clock_offset_s, rate_ppm=options.clock_rate_ppm)
    stand_in.use()
    # Only now: what it imports imports vLLM, and reads the clock.
    from backhaul_simulator.app import serve

    ranks = range(arguments.first_rank, arguments.first_rank + arguments.ranks)
    of_ranks = {
        rank: replace(options, connector=options.connector and rank not in arguments.stock_ranks) for rank in ranks
    }
    return asyncio.run(
        serve(
            of_ranks,
            host=arguments.host,
            port=arguments.port,
            api_key=arguments.api_key,
            context=_context(arguments) if arguments.ssl_certfile else None,
            store=arguments.store_responses,
        )
    )


def _context(arguments: argparse.Namespace) -> ssl.SSLContext:
    """Returns what vLLM's server makes of the same options (uvicorn/config.py, ``create_ssl_context``)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
    if arguments.ssl_ca_certs:
        context.load_verify_locations(arguments.ssl_ca_certs)
    context.verify_mode = ssl.VerifyMode(arguments.ssl_cert_reqs)
    return context


if __name__ == "__main__":
    sys.exit(main())
