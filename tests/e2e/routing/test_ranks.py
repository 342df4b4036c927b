"""Servers of one engine per data-parallel rank: a turn goes to the very engines that hold and make its blocks.

Judged by the engines' own counts; texts by what the model itself answers.
"""

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_local.engines import MODEL_NAME
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from backhaul_router.core.lookup import scope_of
from backhaul_router.core.routing.target import RANK_HEADER
from backhaul_simulator import tokens
from backhaul_simulator.model import Model
from tests.e2e.stack.chat import Chat, Messages, Reply, answered, opening
from tests.e2e.stack.conftest import eventually, eventually_warm

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

ROUTER = ("--lookup-budget-s", "0.5")
NO_PROXY = [("grpc.enable_http_proxy", 0)]
RANKS = 2
TOKENS = 40
CROWD = 6
"""Conversations at once: enough that no router gives all to one rank."""
SPEED = ("--recompute-threshold", "1", "--prefill-tokens-per-s", "20000", "--decode-step-s", "0.005")
"""Slow enough that computing costs more than reading, and that conversations are under way at once."""


class Server:
    """A server's engines, in the order in which it counts them."""

    def __init__(self, stack: Stack, name: str) -> None:
        self._node = stack.node(name)
        self._http = httpx2.Client(base_url=self._node.url, timeout=30, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def ledgers(self) -> list[dict[str, Any]]:
        """Returns what each engine counts."""
        ledgers: list[dict[str, Any]] = self._http.get("/simulator/ledger").json()["ranks"]
        return ledgers

    def engine_ids(self) -> list[str]:
        return [ledger["engine_id"] for ledger in self.ledgers()]

    def reads(self, kind: str, what: str) -> list[int]:
        """Returns how many reads each engine began, completed, or served to others."""
        return [ledger["reads"][kind][what] for ledger in self.ledgers()]

    def prompt_counts(self) -> list[float]:
        """Returns the prompts' tokens that each engine has got."""
        lines = self._http.get("/metrics").text.splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prompt_tokens_total{")]

    def holder(self, salt: str) -> int:
        """Waits until one set is held of a conversation; returns the engine that holds it."""
        eventually(lambda: len(self.holders(salt)) == 1, within_s=20)
        return self.holders(salt)[0]

    def holders(self, salt: str) -> list[int]:
        """Returns the engine of each set that is held of a conversation."""
        scope = scope_of(model=MODEL_NAME, cache_salt=salt, tenant="")
        with grpc.insecure_channel(self._node.agent_address, options=NO_PROXY) as channel:
            held = agent_pb2_grpc.BlockSetServiceStub(channel).ListBlockSets(
                agent_pb2.ListBlockSetsRequest(), timeout=10, wait_for_ready=True
            )
        engine_ids = self.engine_ids()
        return [engine_ids.index(one.engine_id) for one in held.block_sets if one.scope == scope]


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a test talks to."""

    stack: Stack
    prefill: Server
    decode: Server
    chats: Mapping[str, Chat]
    """A client for each route, by the route that its router prefers."""

    def check(self) -> None:
        """Nothing wrong was read, nothing twice, and every read came to its end."""
        for ledger in [*self.prefill.ledgers(), *self.decode.ledgers()]:
            wrong = ("wrong_reads_used", "second_reads", "reads_of_freed", "late_reads_failed", "pinned")
            assert {name: ledger[name] for name in wrong} == dict.fromkeys(wrong, 0)
            assert [reads["failed"] for reads in ledger["reads"].values()] == [0, 0]


def _running(prefill: SimulatedEngine, decode: SimulatedEngine, state: Path) -> Iterator[Ranks]:
    options = StackOptions(
        state=state,
        prefill=[prefill],
        decode=[decode],
        agent_flags=["--lease-ttl-s", "3"],
        router_flags=["--prefer", "warm", *ROUTER],
    )
    with Stack(options) as stack, ExitStack() as exits:
        urls = {"warm": stack.routers[0], "append": stack.add_router(["--prefer", "append", *ROUTER])}
        chats = {route: Chat(url) for route, url in urls.items()}
        for chat in chats.values():
            exits.enter_context(closing(chat.http))
        p, d = (exits.enter_context(closing(Server(stack, name))) for name in ("prefill-1", "decode-1"))
        eventually(lambda: _listed(stack) == [RANKS, RANKS], within_s=30)
        eventually_warm(chats["warm"])
        yield Ranks(stack, p, d, chats)


def _listed(stack: Stack) -> list[int]:
    """Returns how many engines each node has in the directory: those without the connector come a little later."""
    with grpc.insecure_channel(stack.registries[0], options=NO_PROXY) as channel:
        nodes = registry_pb2_grpc.NodeServiceStub(channel).ListNodes(registry_pb2.ListNodesRequest(), timeout=10).nodes
    return [len(node.engines) for node in nodes]


@pytest.fixture(scope="module", params=[0, 4], ids=["all ranks", "the ranks from 4 on"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A prefill and a decode server of two ranks each; they may be those that other servers leave them."""
    first = request.param
    prefill = SimulatedEngine(ranks=RANKS, first_rank=first, flags=SPEED)
    decode = SimulatedEngine(ranks=RANKS, first_rank=first, flags=SPEED)
    yield from _running(prefill, decode, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Servers of which one rank each runs without the connector: 1 of the prefill, 0 of the decode server."""
    prefill = SimulatedEngine(ranks=RANKS, flags=[*SPEED, "--stock-ranks", "1"])
    decode = SimulatedEngine(ranks=RANKS, flags=[*SPEED, "--stock-ranks", "0"])
    yield from _running(prefill, decode, tmp_path_factory.mktemp("mixed"))


def send(chat: Chat, messages: Messages, salt: str) -> Reply:
    """Runs one turn, and looks that its text is the model's own."""
    reply = chat.send(messages, tokens=TOKENS, cache_salt=salt)
    assert reply.status == 200, reply.raw
    right = Model().answer(tokens.encode_chat(messages), max_tokens=TOKENS, min_tokens=TOKENS)
    assert reply.text == "".join(map(tokens.decode, right))
    return reply


def begun(chat: Chat) -> dict[str, Messages]:
    """Begins conversations at once; returns the messages of their second turns, by their salts."""
    openings = {uuid.uuid4().hex: opening() for _ in range(CROWD)}
    with ThreadPoolExecutor(CROWD) as pool:
        replies = pool.map(lambda salt: send(chat, openings[salt], salt), openings)
        return {salt: answered(openings[salt], reply.text) for salt, reply in zip(openings, replies, strict=True)}


def more(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(after, before, strict=True)]


def only(place: int, count: int = 1) -> list[int]:
    return [count if place == each else 0 for each in range(RANKS)]


def test_conversations_spread_over_the_ranks_and_each_turn_goes_where_its_blocks_are(ranks: Ranks) -> None:
    chat, p, d = ranks.chats["warm"], ranks.prefill, ranks.decode
    conversations = begun(chat)
    assert all(p.reads("handoff", "served")), "one rank of the prefill server computed everything"
    assert {d.holder(salt) for salt in conversations} == {0, 1}
    for salt, second in conversations.items():
        messages = second
        for _ in range(2):
            holder = d.holder(salt)
            read, made = p.reads("claimed", "completed"), p.reads("handoff", "served")
            served, taken = d.reads("claimed", "served"), d.reads("handoff", "completed")
            reply = send(chat, messages, salt)
            assert reply.route == "warm", reply.miss
            assert d.holder(salt) == holder
            # Read back from the engine that holds it, and handed off to it by the engine that read.
            assert more(d.reads("claimed", "served"), served) == only(holder)
            assert more(d.reads("handoff", "completed"), taken) == only(holder)
            reader = more(p.reads("claimed", "completed"), read)
            assert sum(reader) == 1
            assert more(p.reads("handoff", "served"), made) == reader
            messages = answered(messages, reply.text)
    ranks.check()


def test_an_append_goes_to_the_rank_that_holds_the_conversation(ranks: Ranks) -> None:
    p, d = ranks.prefill, ranks.decode
    for salt, messages in begun(ranks.chats["append"]).items():
        holder, computed, before = d.holder(salt), p.prompt_counts(), d.prompt_counts()
        reply = send(ranks.chats["append"], messages, salt)
        assert reply.route == "append", reply.miss
        assert d.holder(salt) == holder
        assert p.prompt_counts() == computed
        assert [bool(count) for count in more(d.prompt_counts(), before)] == [place == holder for place in range(RANKS)]
    ranks.check()


@pytest.mark.parametrize("asked", ["1", "99"])
def test_a_client_has_no_say_in_which_rank_it_gets(ranks: Ranks, asked: str) -> None:
    chat = Chat(ranks.stack.routers[0], headers={RANK_HEADER: asked})
    with closing(chat.http):
        conversations = begun(chat)
        holders = {salt: ranks.decode.holder(salt) for salt in conversations}
        assert set(holders.values()) == {0, 1}
        for salt, messages in conversations.items():
            assert send(chat, messages, salt).route == "warm"
            assert ranks.decode.holder(salt) == holders[salt]
    ranks.check()


def test_nothing_goes_to_ranks_that_have_started_anew_by_a_handle_of_those_before(ranks: Ranks) -> None:
    chat, p, d = ranks.chats["warm"], ranks.prefill, ranks.decode
    conversations = begun(chat)
    before = d.engine_ids()
    ranks.stack.kill("decode-1")
    ranks.stack.restart("decode-1")
    eventually(lambda: httpx2.get(f"{ranks.stack.routers[0]}/ready", trust_env=False).status_code == 200, within_s=30)
    assert not {*before} & {*d.engine_ids()}
    read = p.reads("claimed", "started")
    with ThreadPoolExecutor(CROWD) as pool:
        replies = pool.map(lambda salt: send(chat, conversations[salt], salt), conversations)
        assert {reply.route for reply in replies} == {"cold"}
    assert p.reads("claimed", "started") == read
    assert d.reads("claimed", "served") == [0, 0]
    assert {d.holder(salt) for salt in conversations} <= {0, 1}
    eventually_warm(chat)
    ranks.check()


def test_a_rank_without_the_connector_serves_turns_and_neither_holds_nor_reads_any(mixed: Ranks) -> None:
    chat, p, d = mixed.chats["warm"], mixed.prefill, mixed.decode
    conversations = begun(chat)
    routes: Counter[str] = Counter()
    for salt, messages in conversations.items():
        reply = send(chat, messages, salt)
        routes[reply.route] += 1
        assert (reply.route, reply.miss) in {("warm", ""), ("cold", "not_found")}
        assert d.holders(salt) in ([], [1])
    assert {*routes} == {"warm", "cold"}
    assert all(p.reads("handoff", "served"))
    assert all(d.reads("handoff", "completed"))
    assert [count > 0 for count in d.reads("claimed", "served")] == [False, True]
    assert [count > 0 for count in p.reads("claimed", "started")] == [True, False]
    mixed.check()
