"""Plays turns over vLLM's scheduler with each connector, in turn, and prints one JSON line per measurement.

    python -m benchmarks.connector.scheduler_arm MODEL --tokens N ... --rounds N --retained N

Runs in the engine environment; ``MODEL`` is read for its configuration only.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.connector.arms import AGENTS, STOCK
from benchmarks.connector.loop import SchedulerLoop
from benchmarks.connector.turns import WEIGHTS, Turns

_CROWD, _CROWD_TOKENS = 64, 1024
"""Turns that run at once in one measurement."""
_REPLY = 64
_RETAINED_TOKENS = 256
_SLOW_QUEUE = 100
"""Messages that may wait for the slow agent: few, so that it is told all anew again and again."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.connector.scheduler_arm")
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--retained", type=int, required=True)
    return parser


def _transfer(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "kv_lease_duration": 180, **extra},
    }


def _backhaul(socket: Path, agent: str) -> dict[str, Any]:
    queue = {"backhaul_max_queued": _SLOW_QUEUE} if agent == "stalls" else {}
    made = _transfer(backhaul_agent_socket=str(socket), backhaul_weights_digest=WEIGHTS, **queue)
    return {**made, "kv_connector_module_path": "backhaul_connector"}


@contextmanager
def _peer(socket: Path, agent: str) -> Iterator[None]:
    """Runs an agent of its kind."""
    if not agent:
        yield
        return
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.connector.peer", str(socket), agent])
    try:
        while not socket.exists():
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


def _loops(model: Path, folder: Path, stack: ExitStack) -> Mapping[str, SchedulerLoop]:
    loops = {STOCK: SchedulerLoop(model, _transfer())}
    for arm, agent in AGENTS.items():
        socket = folder / arm
        stack.enter_context(_peer(socket, agent))
        loops[arm] = SchedulerLoop(model, _backhaul(socket, agent))
    for loop in loops.values():
        stack.callback(loop.close)
    return loops


def _say(arm: str, role: str, tokens: int, figures: dict[str, Any]) -> None:
    print(json.dumps({"arm": arm, "role": role, "tokens": tokens, **figures}), flush=True)  # noqa: T201


def main(argv: Sequence[str] | None = None) -> int:
    """Measures."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        loops = _loops(options.model, Path(folder), stack)
        turns = {arm: Turns(loop, arm) for arm, loop in loops.items()}
        for arm, made in turns.items():
            made.retain(_RETAINED_TOKENS, options.retained if arm != STOCK else 0)
        # As an engine does once it is up (vLLM's ``v1/engine/core.py``, ``freeze_gc_heap``).
        gc.collect()
        gc.freeze()
        for _ in range(options.rounds):
            for tokens in options.tokens:
                for arm, made in turns.items():
                    _say(arm, "decode", tokens, made.decode(tokens, reply=_REPLY))
                    _say(arm, "prefill", tokens, made.prefill(tokens))
            for arm, made in turns.items():
                _say(arm, "crowd", _CROWD_TOKENS, made.decode(_CROWD_TOKENS, reply=_REPLY, count=_CROWD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
