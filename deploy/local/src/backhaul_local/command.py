"""Command line: `run` plays the demo conversation, `up` keeps the stack running, `certs` makes certificates."""

import argparse
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
from rich.console import Console

from backhaul_local.certificates import LOOPBACK, ROLES, write_all
from backhaul_local.conversation import Plan, Turn, play
from backhaul_local.engines import MODEL_NAME, EngineOptions
from backhaul_local.model_store import ensure_model
from backhaul_local.options import StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.progress import ConsoleSteps, Steps
from backhaul_local.secured import StackTls
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from backhaul_local.table import comparison, verdict

_KEPT_STATES = 5
_LOOKUP_BUDGET_S = 0.25
"""Engines and services share the cores: a lookup now and then waits longer for one than the router's default allows."""

_SIMULATED_SPEEDS = ("--prefill-tokens-per-s", "2000", "--decode-step-s", "0.01", "--transfer-block-s", "0.0002")
"""Slow enough that the difference between routes can be seen."""

_WARM_UP = Plan(turns=2, document_words=300, reply_tokens=80)
"""Enough for both engines to have met, in both directions, before anything is measured."""

UP = """
[bold]The stack is up.[/bold] {front}: {url} (gRPC {grpc}, for gateways {planner}), console: {console}, logs: {logs}
Registries: {registries}. Agents: {agents}
Metrics (/metrics): {metrics}

Try it:

curl -iN {shown}{url}/v1/chat/completions -H 'content-type: application/json' -d '{{
  "model": "{model}", "stream": true, "max_tokens": 40,
  "messages": [{{"role": "user", "content": "'"$(yes 'Tell me about the road.' | head -40 | tr '\\n' ' ')"'"}}]}}'

or, in .venv/bin/python:

import uuid
from openai import {imports}

client = OpenAI(base_url="{url}/v1", api_key="none"{client})
messages = [{{"role": "user", "content": f"{{uuid.uuid4()}} " + "Tell me about the road. " * 100}}]
for turn in range(3):
    reply = client.chat.completions.with_raw_response.create(model="{model}", messages=messages, max_tokens=100)
    print({{name: value for name, value in reply.headers.items() if name.startswith("x-backhaul-")}})
    messages.append({{"role": "assistant", "content": reply.parse().choices[0].message.content}})
    messages.append({{"role": "user", "content": "Say more."}})

(The first word is another one each time: what was said before is in the engines' own caches, and nothing need be read.)

An agent that is told to end (kill -TERM) drains its node, and is started again a while later: docs/operations.md
{engines}Ctrl-C stops everything."""
"""What `up` shows when all is up."""

_SIMULATED_ENGINES = """The engines are simulated: their words mean nothing, and change when a wrong block is read.
What they counted: {ledgers}
How to make one misbehave: docs/simulator.md

"""


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="backhaul-local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="play a conversation with and without reuse", formatter_class=formatter)
    up = commands.add_parser("up", help="keep the stack running in the foreground", formatter_class=formatter)
    plan = Plan()
    certs = commands.add_parser(
        "certs", help="make a CA and certificates for all services, for trying TLS", formatter_class=formatter
    )
    certs.add_argument("--folder", type=Path, default=Path(".state/certs"), help="where; a CA that is there stays")
    certs.add_argument(
        "--hosts",
        type=_hosts,
        default=",".join(LOOPBACK),
        metavar="HOST,...",
        help="what the certificates name besides",
    )
    run.add_argument("--turns", type=_count, metavar="N", default=plan.turns, help="turns of the conversation")
    run.add_argument(
        "--document-words", type=_count, metavar="N", default=plan.document_words, help="length of the first message"
    )
    run.add_argument(
        "--reply-tokens", type=_count, metavar="N", default=plan.reply_tokens, help="length of every reply"
    )
    for command, prefer, engines in ((run, "warm", "1"), (up, "auto", "1, simulated: 2")):
        command.add_argument(
            "--prefer",
            choices=["auto", "cold", "warm", "append"],
            default=prefer,
            help="route that turns take wherever it can be taken; auto: the one that is estimated to be the fastest",
        )
        command.add_argument(
            "--engine-python",
            type=Path,
            default=Path(os.environ.get("BACKHAUL_ENGINE_PYTHON", ".venv-engine/bin/python")),
            help="Python of the environment that holds vLLM (BACKHAUL_ENGINE_PYTHON)",
        )
        command.add_argument("--state", type=Path, default=Path(".state"), help="folder for models, data and logs")
        command.add_argument("--size", choices=["demo", "tiny"], default="demo", help="size of the random model")
        command.add_argument("--simulated", action="store_true", help="simulated engines instead of vLLM")
        command.add_argument(
            "--simulator-options",
            type=shlex.split,
            default=[],
            metavar="OPTIONS",
            help="options of every simulated engine: --simulator-options='--block-size 16 --decode-step-s 0.02' "
            "(python -m backhaul_simulator --help lists them)",
        )
        command.add_argument(
            "--prefill",
            type=_count,
            metavar="N",
            default=argparse.SUPPRESS,
            help=f"prefill engines (default: {engines})",
        )
        command.add_argument(
            "--decode",
            type=_count,
            metavar="N",
            default=argparse.SUPPRESS,
            help=f"decode engines (default: {engines})",
        )
        command.add_argument("--etcd-members", type=_count, default=1, metavar="N", help="members of the etcd cluster")
        command.add_argument("--registries", type=_count, default=1, metavar="N", help="registry replicas")
        command.add_argument("--routers", type=_count, default=1, metavar="N", help="router replicas")
        command.add_argument("--tls", action="store_true", help="TLS on every hop, with certificates made for it")
        command.add_argument("--gateway", choices=["none", "envoy"], default="none", help="what is in front of routers")
    return parser


def _hosts(text: str) -> list[str]:
    return list(filter(None, text.split(",")))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


@contextmanager
def _stack(options: argparse.Namespace, console: Console, steps: Steps) -> Iterator[Stack]:
    state = options.state.resolve()
    stack_options = StackOptions(
        state=_new_state(state / "stacks"),
        etcd_members=options.etcd_members,
        registries=options.registries,
        routers=options.routers,
        router_flags=["--lookup-budget-s", str(_LOOKUP_BUDGET_S), "--prefer", options.prefer, "--explain"],
        tls=options.tls,
        console=True,
        gateway=options.gateway == "envoy",
        default_ports=True,
        metrics=options.command == "up",
        **(_simulated(options) if options.simulated else _real(options, state, steps)),
    )
    with Stack(stack_options, steps) as stack:
        try:
            yield stack
        except openai.OpenAIError:
            console.print(f"A turn failed; logs are in {stack.logs}", soft_wrap=True)
            raise
        finally:
            console.print("Stopping everything ...")


def _simulated(options: argparse.Namespace) -> dict[str, Any]:
    # Of an option that is given twice, the last counts.
    flags = [*_SIMULATED_SPEEDS, *options.simulator_options]
    # A conversation that is played alone takes turns with two prefill engines, and finds half of itself in each cache.
    count = 1 if options.command == "run" else 2
    return {
        "prefill": [SimulatedEngine(flags=flags)] * vars(options).get("prefill", count),
        "decode": [SimulatedEngine(flags=flags, ttl_s=480)] * vars(options).get("decode", count),
    }


def _real(options: argparse.Namespace, state: Path, steps: Steps) -> dict[str, Any]:
    if options.simulator_options:
        raise LocalError("--simulator-options are for --simulated engines")
    if not options.engine_python.exists():
        raise LocalError(f"no engine environment at {options.engine_python}: run `make install`")
    # Not resolved: the link in bin/ is what makes a Python that of an environment.
    engine_python = options.engine_python.absolute()
    steps.begin("Making the model")
    model = ensure_model(engine_python, options.size, state / "models")
    steps.end("Making the model")
    return {
        "engine_python": engine_python,
        "model": model,
        "prefill": [EngineOptions()] * vars(options).get("prefill", 1),
        "decode": [EngineOptions(ttl_s=480)] * vars(options).get("decode", 1),
    }


def _new_state(root: Path) -> Path:
    """Returns a new folder, and removes the oldest ones whose launchers have ended."""
    root.mkdir(parents=True, exist_ok=True)
    ended = [old for old in sorted(root.iterdir()) if not Path("/proc", old.name.rpartition("-")[2]).exists()]
    for old in ended[: -_KEPT_STATES + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _run(options: argparse.Namespace, console: Console) -> int:
    plan = Plan(turns=options.turns, document_words=options.document_words, reply_tokens=options.reply_tokens)
    with ConsoleSteps(console) as steps, _stack(options, console, steps) as stack:
        url = stack.gateway or stack.routers[0]
        steps.begin("Warming up")
        for reuse in (False, True):
            play(url, _WARM_UP, reuse=reuse, tls=stack.tls.context() if stack.tls else None)
        steps.end("Warming up")
        without = _arm(stack, plan, console, steps, reuse=False)
        with_reuse = _arm(stack, plan, console, steps, reuse=True)
        console.print(comparison(with_reuse, without))
        same, sentence = verdict(with_reuse, without)
        console.print(sentence, style="green" if same else "bold red")
    return 0 if same else 1


def _arm(stack: Stack, plan: Plan, console: Console, steps: Steps, *, reuse: bool) -> Sequence[Turn]:
    arm = "with reuse" if reuse else "without reuse"

    def begin(number: int) -> None:
        steps.begin(f"Turn {number} {arm}")

    def end(number: int, turn: Turn) -> None:
        steps.end(f"Turn {number} {arm}")
        beginning = " ".join(turn.text.split()[:6])
        console.print(
            f"  {turn.route}, {turn.prompt_tokens} tokens, {turn.ttft_s * 1000:.0f} ms: {beginning} ...", soft_wrap=True
        )

    url, tls = stack.gateway or stack.routers[0], stack.tls.context() if stack.tls else None
    return play(url, plan, reuse=reuse, tls=tls, on_begin=begin, on_end=end)


def _up(options: argparse.Namespace, console: Console) -> int:
    with ConsoleSteps(console) as steps, _stack(options, console, steps) as stack:
        text = UP.format(
            url=stack.gateway or stack.routers[0],
            front="Envoy" if stack.gateway else "Router",
            grpc=stack.grpc_routers[0],
            planner=stack.planners[0],
            console=stack.consoles[0],
            logs=stack.logs,
            registries=", ".join(stack.registries),
            agents=", ".join(f"{node.name} {node.agent_address}" for node in stack.nodes),
            metrics=", ".join(f"{name} {address}" for name, address in stack.metrics.items()),
            model=MODEL_NAME,
            **how_to_call(stack.tls),
            engines=_about_simulated(stack) if options.simulated else "",
        )
        console.print(text, highlight=False, soft_wrap=True)
        try:
            stack.watch(partial(console.print, highlight=False, soft_wrap=True))
        except KeyboardInterrupt:
            return 0


def how_to_call(tls: StackTls | None) -> dict[str, str]:
    """Returns what clients show and trust, in the words of curl and of Python."""
    if tls is None:
        return {"shown": "", "imports": "OpenAI", "client": ""}
    ca, pair = tls.ca, tls.client
    context = f'ssl.create_default_context(cafile="{ca}")'
    return {
        "shown": f"--cacert {ca} --cert {pair.cert} --key {pair.key} \\\n  ",
        "imports": "DefaultHttpxClient, OpenAI\nimport ssl\n\n"
        f'tls = {context}\ntls.load_cert_chain("{pair.cert}", "{pair.key}")',
        "client": ", http_client=DefaultHttpxClient(verify=tls)",
    }


def _about_simulated(stack: Stack) -> str:
    return _SIMULATED_ENGINES.format(ledgers=" ".join(f"{node.url}/simulator/ledger" for node in stack.nodes))


def _certs(options: argparse.Namespace, console: Console) -> int:
    try:
        write_all(options.folder, options.hosts)
    except (OSError, ValueError) as error:
        raise LocalError(f"no certificates made: {error}") from error
    about = f"{options.folder}: ca.pem, and NAME.pem and NAME.key for {', '.join(ROLES)}. How to use them: docs/tls.md"
    console.print(about, highlight=False, soft_wrap=True)
    return 0


def run_command(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. Raises KeyboardInterrupt when it is interrupted."""
    options = _parser().parse_args(argv)
    console = Console()
    try:
        return {"run": _run, "up": _up, "certs": _certs}[options.command](options, console)
    except (LocalError, openai.OpenAIError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
