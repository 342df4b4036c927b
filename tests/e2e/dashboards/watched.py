"""A stack of simulated engines, read as deploy/dashboards/prometheus.yaml says, and turns of all kinds."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.dashboards import ALERTS, FOLDER, Panel
from tests.e2e.stack.chat import Chat, answered, opening
from tests.fakes.prometheus import Prometheus

BUDGET = ("--lookup-budget-s", "0.5")
FAST = ["--recompute-threshold", "1", "--prefill-tokens-per-s", "20000", "--decode-step-s", "0.002"]
TOKENS = 40
"""Of an answer."""
GRAFANA = {"$__rate_interval": "1m", "$job": "backhaul", "$engines": "engines"}
"""What Grafana puts in the place of its variables."""


class Watched:
    """The stack, its Prometheus, and clients of two routers: one prefers to read blocks, one to append."""

    def __init__(self, stack: Stack, prometheus: Prometheus, warm: Chat, append: Chat) -> None:
        self.prometheus = prometheus
        self._stack = stack
        self._warm = warm
        self._append = append

    def play(self) -> None:
        """Plays a conversation on all routes, whose last turn waits for another."""
        messages = opening()
        for chat in (self._warm, self._warm, self._append):
            messages = answered(messages, chat.send(messages, tokens=TOKENS).text)
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda one: self._append.send(one, tokens=TOKENS), (messages, opening())))

    def fail(self) -> None:
        """Plays a turn that every decode engine refuses."""
        for node in self._stack.nodes:
            if node.role == "decode":
                fault = {"next": [{"fault": "refuse", "status": 500, "message": "out of order", "times": 2}]}
                self._warm.http.post(f"{node.url}/simulator/faults", json=fault).raise_for_status()
        assert self._warm.send(opening(), tokens=TOKENS).status >= 500
        for node in self._stack.nodes:
            self._warm.http.delete(f"{node.url}/simulator/faults").raise_for_status()

    def empty(self, panel: Panel) -> list[str]:
        """Returns those of a panel's queries that have nothing to show now."""
        return [query.expr for query in panel.queries if not self.values(query.expr)]

    def values(self, expr: str) -> list[Any]:
        """Returns what a query answers now, without what is no number."""
        found = self.prometheus.get("query", query=filled_in(expr))["result"]
        return [one for one in found if one["value"][1] != "NaN"]

    def present(self) -> set[str]:
        """Returns the names of all metrics that were read."""
        return set(self.prometheus.get("label/__name__/values"))


def filled_in(expr: str) -> str:
    """Returns a query as Grafana sends it."""
    for variable, value in GRAFANA.items():
        expr = expr.replace(variable, value)
    return expr


@contextmanager
def watched(state: Path) -> Iterator[Watched]:
    """Runs it all until left."""
    engine = SimulatedEngine(flags=FAST)
    options = StackOptions(
        state=state,
        prefill=[engine],
        decode=[engine],
        tls=True,
        metrics=True,
        router_flags=["--prefer", "warm", *BUDGET],
    )
    with Stack(options) as stack:
        assert stack.tls is not None
        appending = stack.add_router(["--prefer", "append", "--max-turns", "1", "--max-queued", "4", *BUDGET])
        warm, append = (Chat(url, tls=stack.tls.context()) for url in (stack.routers[0], appending))
        with closing(warm.http), closing(append.http), Prometheus(state, _config(stack)) as prometheus:
            yield Watched(stack, prometheus, warm, append)


def _config(stack: Stack) -> dict[str, Any]:
    """Returns the example with this stack's addresses and certificates, reading once a second."""
    assert stack.tls is not None
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    files = {"ca_file": stack.tls.ca, "cert_file": stack.tls.client.cert, "key_file": stack.tls.client.key}
    services = list(stack.metrics.values())
    engines = [node.url.removeprefix("https://") for node in stack.nodes]
    for job, targets in zip(config["scrape_configs"], (services, engines), strict=True):
        job["static_configs"] = [{"targets": targets}]
        job |= {"scheme": "https", "tls_config": {name: str(path) for name, path in files.items()}}
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return {**config, "rule_files": [str(ALERTS)]}
