"""Measures whether the time of an answer tells one tenant of another's conversations.

One tenant has conversations; another sends turns, with the very messages and id of one of them or with others of the
same length that nobody has sent, and ends conversations, that one or one that never was. Its own tenant does the same:
that shows that the measurement sees what there is to see.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from urllib.parse import quote

import aiohttp
from rich.console import Console
from rich.table import Table

from backhaul_local.judged import run_judged
from backhaul_local.options import StackOptions
from backhaul_local.progress import ConsoleSteps
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from backhaul_router.keys import line_for, new_key
from benchmarks.tenants.figures import Comparison

_OWNER, _OTHER = "its own tenant", "another tenant"
_WORDS = 120
"""Of one message; enough for engines to take their time."""
_SPEED = ("--prefill-tokens-per-s", "8000", "--block-size", "16", "--block-count", "4000")

Message = dict[str, str]
Times = Mapping[tuple[str, str], Comparison]
"""By who asks and what is asked."""


class Prober:
    """One tenant's client of one router."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, key: str) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"}

    async def turn(self, messages: Sequence[Message], session_id: str, answer_tokens: int = 1) -> tuple[float, str]:
        """Runs a turn; returns the time to the first byte of the answer, seconds, and the answer."""
        body = {
            "model": self._model,
            "messages": [*messages],
            "max_tokens": answer_tokens,
            "min_tokens": answer_tokens,
            "temperature": 0,
        }
        headers = {**self._headers, "x-session-id": session_id}
        begin = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
            took_s = time.perf_counter() - begin
            response.raise_for_status()
            answer = await response.json()
        return took_s, str(answer["choices"][0]["message"]["content"])

    async def end(self, session_id: str) -> float:
        """Ends a conversation; returns the time to the answer, seconds."""
        url = f"{self._url}/v1/conversations/{quote(session_id)}"
        begin = time.perf_counter()
        async with self._session.delete(url, headers=self._headers) as response:
            took_s = time.perf_counter() - begin
            response.raise_for_status()
        return took_s


async def _measure(url: str, model: str, keys: Sequence[str], rounds: int, rng: Random) -> Times:
    times: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    async with aiohttp.ClientSession(trust_env=False) as session:
        owner, other = (Prober(session, url, model, key) for key in keys)
        for number in range(rounds):
            # The other one first: what its own tenant asks for is used up.
            for name, prober in ((_OTHER, other), (_OWNER, owner)):
                probe = f"{name}-{number}"
                messages, unsaid = ([_said(rng)] for _ in range(2))
                _, answer = await owner.turn(messages, probe, answer_tokens=_WORDS)
                for there in rng.sample((True, False), 2):
                    before = [*messages, _answered(answer)] if there else [*unsaid, _answered(_shuffled(answer, rng))]
                    asked = [*before, _said(rng)]
                    took_s, _ = await prober.turn(asked, probe if there else f"no-{probe}")
                    times[name, "a turn", there].append(took_s)
                await owner.turn(messages, f"end-{probe}")
                for there in rng.sample((True, False), 2):
                    took_s = await prober.end(f"end-{probe}" if there else f"never-{probe}")
                    times[name, "its end", there].append(took_s)
    return {
        (name, what): Comparison(found, times[name, what, False])
        for (name, what, there), found in times.items()
        if there
    }


def _said(rng: Random) -> Message:
    return {"role": "user", "content": " ".join(f"{rng.getrandbits(32):08x}" for _ in range(_WORDS))}


def _answered(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _shuffled(text: str, rng: Random) -> str:
    """Returns the same words, for an engine as much work."""
    words = text.split(" ")
    return " ".join(rng.sample(words, len(words)))


def _tenants(folder: Path) -> tuple[list[str], list[str]]:
    """Writes the files of a router with two tenants; returns their keys and its flags."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [new_key(), new_key()]
    tables = [f"[tenants.t{number}]\n{line_for(key)}" for number, key in enumerate(keys)]
    (folder / "tenants.toml").write_text("\n".join(tables))
    (folder / "cluster.key").write_text(new_key())
    return keys, ["--tenants-file", str(folder / "tenants.toml"), "--cluster-key-file", str(folder / "cluster.key")]


def _run(options: argparse.Namespace, console: Console) -> Times:
    state = options.state.resolve() / time.strftime("%Y%m%d-%H%M%S")
    keys, flags = _tenants(state)
    stack_options = StackOptions(
        state=state,
        prefill=[SimulatedEngine(flags=_SPEED)],
        decode=[SimulatedEngine(flags=_SPEED)],
        router_flags=[*flags, "--prefer", "warm", "--lookup-budget-s", "0.5"],
    )
    with ConsoleSteps(console) as steps, Stack(stack_options, steps) as stack:
        return asyncio.run(_measure(stack.routers[0], stack.model_name, keys, options.rounds, Random(options.seed)))


def _show(times: Times, console: Console) -> None:
    table = Table("who asks", "what", "there, ms", "nowhere, ms", "share", "by chance", "times")
    for (name, what), found in sorted(times.items()):
        there, nowhere = found.medians_ms
        chance = f"0.500 ± {found.noise:.3f}"
        table.add_row(name, what, f"{there:.2f}", f"{nowhere:.2f}", f"{found.share:.3f}", chance, str(len(found.there)))
    console.print(table)
    console.print("share: how often what is there takes longer than what is nowhere; 0.5 is a toss of a coin")


def _problems(times: Times) -> list[str]:
    told = [
        f"{what}: the time tells another tenant"
        for (name, what), each in times.items()
        if name == _OTHER and each.tells
    ]
    blind = "the time of a turn tells not even the conversation's own tenant: the measurement shows nothing"
    return told if times[_OWNER, "a turn"].tells else [*told, blind]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; returns 0 when the time told another tenant nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="conversations that are asked about, by each tenant")
    parser.add_argument("--seed", type=int, default=1, help="what all that is random comes from")
    parser.add_argument("--state", type=Path, default=Path(".state/bench-tenants"), help="folder for data and logs")
    return run_judged(partial(_run, parser.parse_args(argv)), show=_show, problems=_problems)


if __name__ == "__main__":
    sys.exit(main())
