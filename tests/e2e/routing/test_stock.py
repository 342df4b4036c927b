"""A decode engine with vLLM's own connector: it is served, and never sent what it would pin for ever."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from backhaul_local.engines import EngineOptions
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.routing.conftest import ROUTER, SOON_S, TOKENS, script
from tests.e2e.stack.chat import Chat, opening
from tests.e2e.stack.conftest import eventually
from tests.engine_fixtures import REAL

pytestmark = pytest.mark.timeout(400)

TTL_S = 3.0
LIMITS = {"auto": "alone_tokens = 400", "append": "alone_tokens = 0"}


@pytest.fixture(scope="module", params=["simulated", REAL])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A prefill engine with Backhaul's connector and a decode engine without, which retains turns all the same."""
    state = tmp_path_factory.mktemp("stock")
    if request.param == "simulated":
        decode = SimulatedEngine(connector=False, ttl_s=TTL_S)
        options = StackOptions(state=state, prefill=[SimulatedEngine()], decode=[decode], router_flags=ROUTER)
    else:
        python, model = (request.getfixturevalue(name) for name in ("engine_python", "tiny_model"))
        options = StackOptions(
            state=state,
            engine_python=python,
            model=model,
            prefill=[EngineOptions()],
            decode=[EngineOptions(connector=False, ttl_s=TTL_S)],
            router_flags=ROUTER,
        )
    with Stack(options) as stack:
        chat = Chat(stack.routers[0])
        eventually(lambda: chat.send(opening(), reuse=False, tokens=1).status == 200, within_s=60)
        chat.http.close()
        yield stack


@pytest.mark.parametrize("prefer", ["auto", "append"])
def test_its_turns_are_cold_and_right_and_it_keeps_nothing_beyond_its_own_time(
    stack: Stack, tmp_path: Path, prefer: str
) -> None:
    path = tmp_path / "routing.toml"
    path.write_text(f"[limits]\n{LIMITS[prefer]}\n")
    with ExitStack() as exit_stack:
        chat = Chat(stack.add_router(["--prefer", prefer, "--routing-file", str(path), *ROUTER]))
        exit_stack.callback(chat.http.close)
        session, salt = uuid.uuid4().hex, uuid.uuid4().hex
        turns = script(chat, ["And what came next?"] * 2, words=75)

        replies = [chat.send(turn.messages, session=session, cache_salt=salt, tokens=TOKENS) for turn in turns]

    assert [(reply.status, reply.route) for reply in replies] == [(200, "cold")] * 3
    assert [reply.text for reply in replies] == [turn.text for turn in turns]
    eventually(lambda: _used(stack) == 0, within_s=TTL_S + SOON_S)


def _used(stack: Stack) -> float:
    lines = httpx2.get(f"{stack.node('decode-1').url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{"))
