"""Turns over a scheduler loop, and what they took in the hooks. Runs in the engine environment."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

from backhaul_connector.anchors import AnchorChain, Anchors, identity_of, stride_of
from benchmarks.connector.clocked import figures
from benchmarks.connector.loop import BLOCK_SIZE, SchedulerLoop, Step

WEIGHTS = "benchmark"
_SCOPE = "scope"
_VOCABULARY = 1000
_NEW_TOKENS = 64
"""What a prompt has beyond what a handle covers."""
_MOST_ASKED = 100
"""Steps within which a handle of any length must be proved."""


class Turns:
    """Makes turns of new conversations."""

    def __init__(self, loop: SchedulerLoop, seed: str) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def decode(self, tokens: int, *, reply: int, count: int = 1) -> dict[str, Any]:
        """Plays ``count`` labelled turns at once at a decode engine: their prompts are read, their blocks retained."""
        requests = [self._labelled(tokens, reply) for _ in range(count)]
        names = [request.request_id for request in requests]
        for request in requests:
            self._loop.add(request)
        steps = [self._loop.step()]
        assert all(map(self._loop.reads, names))
        begun = [*steps, self._loop.step(received=names)]
        steps = [*begun, *self._until(names)]
        return _figures([*steps, *self._free(names)], steps[len(begun) + 2 : -2], count)

    def retain(self, tokens: int, count: int) -> None:
        """Leaves blocks of so many turns retained."""
        for _ in range(count):
            request = self._labelled(tokens, 1)
            self._loop.add(request)
            self._loop.step()
            list(self._until([request.request_id], received=[request.request_id]))

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Plays a turn at a prefill engine, whose prompt begins with what another engine retains."""
        prompt = self._prompt(tokens + _NEW_TOKENS)
        request = self._loop.request(self._name(), prompt, self._handle(prompt[:tokens]), 1)
        name = request.request_id
        self._loop.add(request)
        steps: list[Step] = []
        while not steps or not self._loop.reads(name):
            steps.append(self._loop.step())
            assert len(steps) < _MOST_ASKED, "a handle was not read"
        steps += [self._loop.step(received=[name])]
        steps += self._until([name]) if not steps[-1].finished else []
        return _figures([*steps, *self._free([name])], steps, 1)

    def _labelled(self, tokens: int, reply: int) -> Any:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "backhaul": {"scope": _SCOPE, "keys": [self._name()]},
            **self._remote(tokens),
        }
        return self._loop.request(self._name(), self._prompt(tokens), params, reply)

    def _handle(self, covered: Sequence[int]) -> dict[str, Any]:
        identity = identity_of(weights_digest=WEIGHTS, adapter="", cache_salt="", scope=_SCOPE)
        chain = AnchorChain(identity, stride_of(BLOCK_SIZE))
        chain.extend(covered)
        anchors = Anchors.of(chain, identity)
        proof = {
            "scope": _SCOPE,
            "identity": identity.hex(),
            "stride": anchors.stride,
            "spacing": anchors.spacing,
            "token_count": anchors.token_count,
            "anchors": anchors.digests.hex(),
        }
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "backhaul": proof,
            "remote_num_tokens": len(covered),
            "remote_blocks_expiry_time": 1e12,
            **self._remote(len(covered)),
        }

    def _remote(self, tokens: int) -> dict[str, Any]:
        return {
            "remote_block_ids": [list(range(-(-tokens // BLOCK_SIZE)))],
            "remote_engine_id": "another",
            "remote_request_id": self._name(),
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
        }

    def _until(self, names: Sequence[str], received: Iterable[str] = ()) -> list[Step]:
        left, steps = set(names), []
        while left:
            steps.append(self._loop.step(received=received))
            received = ()
            left -= steps[-1].finished.keys()
        return steps

    def _free(self, names: Sequence[str]) -> list[Step]:
        # What was not digested when a turn ended is in the steps that follow.
        rest = [self._loop.step() for _ in range(10)]
        return [*rest, self._loop.step(sent=names), self._loop.step()]

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(_VOCABULARY), k=tokens)

    def _name(self) -> str:
        return f"turn-{next(self._numbers)}"


def _figures(steps: Sequence[Step], middle: Sequence[Step], count: int) -> dict[str, Any]:
    of_steps = figures([step.hooks for step in steps], [step.hooks for step in middle], count)
    return {**of_steps, "steps": len(steps)}
