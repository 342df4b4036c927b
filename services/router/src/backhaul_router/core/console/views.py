"""The console's JSON: what of nodes, turns and samples is told. No addresses of engines with user names in them, no
prompts, keys or ids of conversations.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from backhaul_common.addresses import join_address
from backhaul_router.core.console.history import Held, History, Sample
from backhaul_router.core.console.journal import Entry, Tally
from backhaul_router.core.console.problems import Problem
from backhaul_router.core.console.reasons import reason_for
from backhaul_router.core.health.circuit import BreakerState
from backhaul_router.core.nodes import Engine, Node
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.turn import Outcome, Route

Document = dict[str, Any]

_DIGITS = 4
"""Of seconds and shares, after the point."""


def node_view(node: Node, breaker: BreakerState, report: Callable[[tuple[str, str]], EngineReport | None]) -> Document:
    """Returns a node with its engines and what is known of their load."""
    return {
        "id": node.node_id,
        "role": node.role.value,
        "state": "orphaned" if node.orphaned else node.state.value,
        "reason": node.state_reason,
        "breaker": breaker.value,
        "models": sorted(node.models),
        "agent": node.agent_address,
        "server": _server(node.engine_url),
        "engines": [_engine_view(engine, report((node.node_id, engine.engine_id))) for engine in node.engines],
    }


def _server(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    return join_address(parts.hostname or "", port or (443 if parts.scheme == "https" else 80))


def _engine_view(engine: Engine, report: EngineReport | None) -> Document:
    held = report.retention if report else None
    return {
        "id": engine.engine_id,
        "rank": engine.rank,
        "reuse": engine.reuse and bool(engine.connector_version),
        "problem": engine.reuse_problem,
        "connector": engine.connector_version,
        "vllm": engine.vllm_version,
        "second_chance": engine.second_chance,
        "fenced": engine.fenced,
        "ttl_s": engine.retention_ttl_s,
        "block_size": engine.block_size,
        "block_count": engine.block_count,
        "tp_size": engine.tp_size,
        "load": report
        and {
            "running": report.running,
            "waiting": report.waiting,
            "kv_usage": round(report.kv_usage, _DIGITS),
            "free_blocks": report.free_blocks,
        },
        "retained": held and {"sets": held.sets, "blocks": held.blocks, "block_limit": held.block_limit},
    }


def held_by(node: Node, report: Callable[[tuple[str, str]], EngineReport | None]) -> Held:
    """Returns what finished turns hold on a node, as far as it is known."""
    total = Held()
    for engine in node.engines:
        seen = report((node.node_id, engine.engine_id))
        if seen and (held := seen.retention):
            total += Held(held.sets, held.blocks, held.block_limit, held.blocks * engine.block_size)
    return total


def turn_view(entry: Entry, *, tenants: bool) -> Document:
    """Returns a turn. ``tenants``: whether there are any."""
    outcome = entry.outcome
    running = not entry.ended_at
    document = {
        "number": entry.number,
        "began_at": round(entry.began_at, _DIGITS),
        "duration_s": None if running else round(entry.ended_at - entry.began_at, _DIGITS),
        "result": "running" if running else entry.result,
        "api": entry.api,
        "model": entry.model[:200],
        "route": outcome.route.value,
        "source": outcome.source,
        "miss": outcome.miss,
        "prefill": entry.prefill,
        "decode": entry.decode,
        "tried": list(entry.tried),
        "holder": entry.holder if outcome.route is Route.WARM else "",
        "repeated": outcome.repeated,
        "fallback": outcome.fallback,
        "prompt_tokens": outcome.prompt_token_count,
        "local_tokens": outcome.local_token_count,
        "read_tokens": outcome.read_token_count,
        "computed_tokens": computed_tokens(outcome),
        "ttft_s": _rounded(outcome.ttft_s),
        "answer_s": _rounded(outcome.answer_s),
        "estimate_s": _rounded(outcome.estimate_s),
        "trace_id": entry.trace_id,
    }
    return document | ({"tenant": entry.tenant} if tenants else {})


def computed_tokens(outcome: Outcome) -> int:
    """Returns the tokens of a prompt that were neither cached nor read."""
    return max(0, outcome.prompt_token_count - outcome.local_token_count - outcome.read_token_count)


def tally_view(tally: Tally) -> Document:
    """Returns the sums since the router's start."""
    return {
        "routes": dict(tally.routes),
        "results": dict(tally.results),
        "misses": dict(tally.misses),
        "continued": tally.continued,
        "reused": tally.reused,
        "prompt_tokens": tally.prompt_tokens,
        "local_tokens": tally.local_tokens,
        "read_tokens": tally.read_tokens,
    }


def sample_view(sample: Sample) -> Document:
    """Returns one step of the history."""
    held = sample.held
    return {
        "at": round(sample.at, 1),
        "routes": dict(sample.routes),
        "continued": sample.continued,
        "reused": sample.reused,
        "failed": sample.failed,
        "prompt_tokens": sample.prompt_tokens,
        "local_tokens": sample.local_tokens,
        "read_tokens": sample.read_tokens,
        "ttft_s": {route: round(seconds, _DIGITS) for route, seconds in sample.ttft_s.items()},
        "retained": {
            "sets": held.sets,
            "blocks": held.blocks,
            "block_limit": held.block_limit,
            "tokens": held.tokens,
        },
    }


def history_view(history: History) -> Document:
    """Returns all samples, and the blocks that each node retained at the last ones."""
    return {
        "samples": [sample_view(sample) for sample in history.samples],
        "nodes": {node_id: list(blocks) for node_id, blocks in history.nodes.items()},
    }


def problem_view(problem: Problem) -> Document:
    """Returns a problem."""
    return {
        "severity": problem.severity.value,
        "text": problem.text,
        "remedy": problem.remedy,
        "nodes": list(problem.nodes),
        "node_count": problem.node_count,
    }


def reasons_view(misses: Iterable[str]) -> Document:
    """Returns what reasons mean, by name."""
    found: Mapping[str, Any] = {miss: reason_for(miss) for miss in misses}
    return {miss: {"meaning": reason.meaning, "remedy": reason.remedy} for miss, reason in found.items()}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
