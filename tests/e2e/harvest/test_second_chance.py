"""Turns whose blocks are retained no more, on simulated engines and on vLLM, with the connector and without it."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from backhaul_local.engines import EngineOptions
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.harvest.chances import BLOCK, DIGEST, RETAIN_NOTHING, Chances, eventually
from tests.engine_fixtures import REAL

LEASE_S = 60.0
STOCK_AGENT = ("--weights-digest", DIGEST, "--engine-lease-s", str(LEASE_S))
DECODE = {"decode-1": "with the connector", "decode-2": "without it"}

pytestmark = pytest.mark.timeout(300)


ROUTER = ("--prefer", "warm")


def simulated(state: Path) -> StackOptions:
    own = SimulatedEngine(lease_s=LEASE_S, agent_flags=RETAIN_NOTHING)
    stock = SimulatedEngine(lease_s=LEASE_S, agent_flags=STOCK_AGENT, connector=False, flags=["--no-bidirectional"])
    return StackOptions(state=state, prefill=[own], decode=[own, stock], router_flags=ROUTER)


def real(state: Path, python: Path, model: Path) -> StackOptions:
    named = {"backhaul_weights_digest": DIGEST}
    own = EngineOptions(lease_s=LEASE_S, extra_config=named, agent_flags=RETAIN_NOTHING)
    plain = {"bidirectional_kv_xfer": False}
    stock = EngineOptions(lease_s=LEASE_S, extra_config=plain, agent_flags=STOCK_AGENT, connector=False)
    return StackOptions(
        state=state, prefill=[own], decode=[own, stock], engine_python=python, model=model, router_flags=ROUTER
    )


@pytest.fixture(scope="module", params=["simulated", REAL])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("h")
    if request.param == "simulated":
        options = simulated(state)
    else:
        options = real(state, request.getfixturevalue("engine_python"), request.getfixturevalue("tiny_model"))
    with Stack(options) as stack:
        yield stack


@pytest.fixture(scope="module")
def all_chances(stack: Stack, request: pytest.FixtureRequest) -> Iterator[dict[str, Chances]]:
    """By decode node."""
    with ExitStack() as exit_stack:
        chances = {}
        for name in DECODE:
            made = chances[name] = Chances(stack, name)
            exit_stack.callback(made.close)
            made.await_offer()
        yield chances


@pytest.fixture(params=list(DECODE), ids=list(DECODE.values()))
def chances(all_chances: dict[str, Chances], request: pytest.FixtureRequest) -> Chances:
    found = all_chances[request.param]
    eventually(lambda: found.usage() == 0)
    return found


def test_what_is_retained_no_more_is_read_by_a_fresh_handle_and_the_text_is_right(chances: Chances) -> None:
    history = chances.turn(chances.tokens(16 * BLOCK), "right")
    pointer = chances.await_pointer("right")
    eventually(lambda: chances.usage() == 0)
    prompt = [*history, *chances.tokens(20)]
    harvested = chances.harvest(prompt, pointer.set_id)
    covered = (len(history) - 1) // BLOCK * BLOCK
    assert covered - BLOCK <= harvested.token_count <= covered
    assert harvested.computed_token_count <= 2 * BLOCK
    assert chances.usage() > 0
    warm = chances.warm(prompt, harvested, 12)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == harvested.token_count
    assert warm["kv_transfer_params"]["backhaul"]["read"] == harvested.token_count
    assert warm["choices"][0]["token_ids"] == chances.cold(prompt, 12)
    eventually(lambda: chances.usage() == 0)


def test_a_handle_that_is_not_used_is_given_back(chances: Chances) -> None:
    history = chances.turn(chances.tokens(16 * BLOCK), "back")
    pointer = chances.await_pointer("back")
    harvested = chances.harvest([*history, 7], pointer.set_id)
    assert chances.usage() > 0
    chances.give_back(harvested)
    eventually(lambda: chances.usage() == 0, 10)


def test_another_salt_or_another_text_has_no_chance(chances: Chances) -> None:
    history = chances.turn(chances.tokens(16 * BLOCK), "other")
    chances.await_pointer("other")
    assert "NOT_FOUND" in chances.refused([*history, 7], salt="other")
    assert "NOT_FOUND" in chances.refused([chances.tokens(1)[0] + 1, *history[1:], 7])
    assert chances.usage() == 0


def test_an_evicted_prefix_is_refused_and_its_pointer_goes_where_its_tokens_are_known(chances: Chances) -> None:
    history = chances.turn(chances.tokens(16 * BLOCK), "gone")
    pointer = chances.await_pointer("gone")
    eventually(lambda: chances.usage() == 0)
    chances.forget()
    # The engine says so with its next step.
    chances.complete(chances.node, chances.tokens(2), 1)
    eventually(lambda: "NOT_FOUND" in chances.refused([*history, 7], pointer.set_id))
    if pointer.identity:
        # Where nobody knows the tokens of what is cached, a refusal may be about another prompt: it only grows old.
        eventually(lambda: chances.pointer("gone") is None)


def test_a_guess_that_is_wrong_costs_no_more_than_its_time_and_is_not_repeated_at_once(chances: Chances) -> None:
    history = chances.turn(chances.tokens(16 * BLOCK), "wrong")
    pointer = chances.await_pointer("wrong")
    eventually(lambda: chances.usage() == 0)
    # Nobody has heard of it: the events come with the next step, which is the request itself.
    chances.forget()
    harvested = chances.harvest([*history, 7], pointer.set_id)
    assert harvested.computed_token_count > 2 * BLOCK
    assert "RESOURCE_EXHAUSTED" in chances.refused([*history, 7], pointer.set_id)
    # Right all the same: the engine has computed it.
    prompt = [*history, 7]
    assert chances.warm(prompt, harvested, 6)["choices"][0]["token_ids"] == chances.cold(prompt, 6)
    time.sleep(1.1)


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A decode engine that computes slowly, and claims that soon lapse."""
    options = simulated(tmp_path_factory.mktemp("l"))
    flags = ["--prefill-tokens-per-s", "1000", "--max-step-tokens", "256"]
    decode = SimulatedEngine(lease_s=LEASE_S, agent_flags=RETAIN_NOTHING, flags=flags)
    with Stack(replace(options, decode=[decode], agent_flags=["--claim-ttl-s", "7"])) as stack:
        yield stack


@pytest.fixture
def slow(slow_stack: Stack) -> Iterator[Chances]:
    chances = Chances(slow_stack, "decode-1")
    chances.await_offer()
    yield chances
    chances.close()


def test_a_deadline_ends_the_engines_work(slow: Chances) -> None:
    history = slow.turn(slow.tokens(64 * BLOCK), "slow")
    pointer = slow.await_pointer("slow")
    eventually(lambda: slow.usage() == 0)
    slow.forget()
    assert "DEADLINE_EXCEEDED" in slow.refused([*history, 7], pointer.set_id, timeout_s=0.3)
    # Two seconds of work were asked for; what was not done by then is not done at all.
    eventually(lambda: slow.usage() == 0)
    eventually(lambda: "NOT_FOUND" in slow.refused([*history, 7], pointer.set_id))


def test_a_handle_that_is_too_old_is_not_read(slow: Chances) -> None:
    history = slow.turn(slow.tokens(16 * BLOCK), "late")
    eventually(lambda: "RESOURCE_EXHAUSTED" not in slow.refused([1]))
    prompt = [*history, *slow.tokens(20)]
    harvested = slow.harvest(prompt, slow.await_pointer("late").set_id)
    params = json.loads(harvested.kv_transfer_params_json)
    slow.forget_prefill()
    # vLLM reads nothing in the last five seconds.
    time.sleep(max(0.0, harvested.ttl.ToTimedelta().total_seconds() - 4.5))
    body = {"model": "backhaul-demo", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
    answer = slow.http.post(f"{slow.prefill.url}/v1/completions", json={**body, "cache_salt": "pepper"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    slow.give_back(harvested)


def test_retention_leaves_handles_alone(slow: Chances) -> None:
    history = slow.turn(slow.tokens(16 * BLOCK), "alone")
    harvested = slow.harvest([*history, 7], slow.await_pointer("alone").set_id)
    for number in range(3):
        slow.turn(slow.tokens(9 * BLOCK), f"alone-{number}")
        slow.await_pointer(f"alone-{number}")
    (rank,) = slow.http.get(f"{slow.node.url}/simulator/ledger").json()["ranks"]
    assert rank["retained"]["claimed"]["sets"] == 0, "retention has released all that is its own"
    assert rank["retained"]["handoff"]["sets"] == 1
    prompt = [*history, 7]
    assert slow.warm(prompt, harvested, 6)["choices"][0]["token_ids"] == slow.cold(prompt, 6)
