"""KV events, and handles for what an engine caches: what agents go by, on simulated engines and on vLLM itself."""

import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import zmq

from backhaul_local.engines import MODEL_NAME
from backhaul_local.ports import HOST
from backhaul_node_agent.core.cached import Cached
from backhaul_node_agent.engine_requests import EngineRequests, Kept
from backhaul_node_agent.kv_events import read
from tests.engine_fixtures import REAL, TTL_S, Engines, forget, running_real, running_simulated
from tests.fakes.engine_pair import Engine, Pair

pytestmark = pytest.mark.timeout(180)

BLOCK = 32
STORED = {
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "session_id",
}  # fmt: skip
REMOVED = {"type", "block_hashes", "medium", "group_idx"}


class Subscriber:
    """Hears one engine's events."""

    def __init__(self, engine: Engine) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.subscribe(b"")
        self._socket.connect(f"tcp://{HOST}:{engine.kv_events_port}")
        self.messages: list[list[bytes]] = []
        self._meet(engine)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def events(self) -> list[dict[str, Any]]:
        """Returns all events so far, as anybody would decode them."""
        return [event for parts in self.messages for event in msgspec.msgpack.decode(parts[2])[1]]

    def receive(self, until: str, *, count: int = 1) -> list[dict[str, Any]]:
        """Waits until so many more events of a type have come; returns what has come since the last call."""
        first = len(self.events())
        while sum(event["type"] == until for event in self.events()[first:]) < count:
            self.messages.append(self._socket.recv_multipart())
        return self.events()[first:]

    def rest(self) -> None:
        """Takes what is on its way."""
        while self._socket.poll(300):
            self.messages.append(self._socket.recv_multipart())

    def _meet(self, engine: Engine) -> None:
        """Publishers drop what nobody hears: asks for blocks until the first event comes."""
        deadline = time.monotonic() + 30
        while not self._socket.poll(100):
            assert time.monotonic() < deadline, "no events"
            engine.complete([7] * BLOCK, None, 1, cache_salt=str(time.monotonic()))
        self.rest()


@pytest.fixture(scope="module", params=["simulated", REAL])
def stock_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("k")
    if request.param == "simulated":
        with running_simulated(folder, agents=False) as engines:
            yield engines
        return
    model, python = request.getfixturevalue("tiny_model"), request.getfixturevalue("engine_python")
    with running_real(folder, python, model, agents=False, ttl_s=TTL_S) as engines:
        yield engines


@pytest.fixture
def stock(stock_engines: Engines, request: pytest.FixtureRequest) -> Pair:
    """Engines without Backhaul's connector, with nothing cached or pinned by an earlier test."""
    forget(stock_engines)
    return Pair(stock_engines.prefill, stock_engines.decode, stock_engines.vocabulary, seed=request.node.name)


@pytest.fixture
def subscriber(stock: Pair) -> Iterator[Subscriber]:
    subscriber = Subscriber(stock.decode)
    cleared(stock, subscriber)
    yield subscriber
    subscriber.close()


def cleared(stock: Pair, subscriber: Subscriber) -> list[dict[str, Any]]:
    """Empties the decode engine's cache; returns the events since. They come with the engine's next step."""
    deadline = time.monotonic() + 20
    while not stock.decode.forget():
        assert time.monotonic() < deadline, "blocks stay pinned"
        time.sleep(0.05)
    stock.decode.complete(stock.tokens(2), None, 1)
    return subscriber.receive("AllBlocksCleared")


def test_a_message_is_a_topic_a_sequence_and_a_batch(stock: Pair, subscriber: Subscriber) -> None:
    before = len(subscriber.messages)
    stock.decode.complete(stock.tokens(3 * BLOCK), None, BLOCK + 2)
    subscriber.receive("BlockStored", count=2)
    assert all(len(parts) == 3 and parts[0] == b"" for parts in subscriber.messages)
    sequences = [struct.unpack(">q", parts[1])[0] for parts in subscriber.messages]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    for parts in subscriber.messages[before:]:
        written, events, rank = msgspec.msgpack.decode(parts[2])
        assert abs(written - time.time()) < 60
        assert events
        assert rank == 0


def test_blocks_are_told_with_tokens_hashes_salt_and_session(stock: Pair, subscriber: Subscriber) -> None:
    prompt = stock.tokens(3 * BLOCK + 5)
    leg = stock.decode.complete(prompt, None, BLOCK, cache_salt="pepper", session_id="backhaul:scope:key")
    history = [*prompt, *leg.tokens]
    first, second = subscriber.receive("BlockStored", count=2)
    assert first.keys() == second.keys() == STORED
    assert [type(block) for block in first["block_hashes"]] == [int] * 3
    assert first["token_ids"] == history[: 3 * BLOCK]
    assert second["token_ids"] == history[3 * BLOCK : 4 * BLOCK]
    assert (first["parent_block_hash"], second["parent_block_hash"]) == (None, first["block_hashes"][-1])
    assert (first["extra_keys"], second["extra_keys"]) == ([["pepper"], None, None], [None])
    for event in (first, second):
        same = (event["block_size"], event["medium"], event["group_idx"], event["session_id"])
        assert same == (BLOCK, "GPU", 0, "backhaul:scope:key")
        assert event["kv_cache_spec_kind"] == "full_attention"
        assert event["lora_id"] is event["lora_name"] is None


def test_evictions_and_a_reset_are_told(stock: Pair, subscriber: Subscriber) -> None:
    stored = []
    for _ in range(3):
        stock.decode.complete(stock.tokens(50 * BLOCK), None, 2)
        stored += subscriber.receive("BlockStored")
    removed = [event for event in stored if event["type"] == "BlockRemoved"]
    assert removed
    assert all(event.keys() == REMOVED and (event["medium"], event["group_idx"]) == ("GPU", 0) for event in removed)
    known = {block for event in stored if event["type"] == "BlockStored" for block in event["block_hashes"]}
    assert {block for event in removed for block in event["block_hashes"]} <= known
    assert cleared(stock, subscriber)[-1] == {"type": "AllBlocksCleared"}


def test_what_an_agent_counts_is_what_the_engine_finds(stock: Pair, subscriber: Subscriber) -> None:
    histories: list[tuple[list[int], str]] = []
    for number in range(5):
        salt = f"salt{number % 2}"
        prompt = stock.tokens(20 * BLOCK + 7 * number)
        histories.append(([*prompt, *stock.decode.complete(prompt, None, 40, cache_salt=salt).tokens], salt))
    subscriber.rest()
    cached = Cached()
    for parts in subscriber.messages:
        cached.apply(*read(parts))
    for history, salt in histories:
        counted = cached.count([*history, 7], salt)
        usage = stock.decode.complete([*history, 7], None, 1, cache_salt=salt).body["usage"]
        assert counted == ((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
    assert max(cached.count([*history, 7], salt) for history, salt in histories) > 20 * BLOCK


@pytest.fixture
async def stock_requests(stock: Pair) -> AsyncIterator[EngineRequests]:
    async with EngineRequests(stock.decode.url, api_key="") as requests:
        yield requests


async def keep(requests: EngineRequests, token_ids: Sequence[int], salt: str = "") -> Kept:
    return await requests.keep(model=MODEL_NAME, token_ids=token_ids, salt=salt, rank=None, left_over=lambda kept: None)


async def test_an_engine_without_the_connector_makes_a_handle_that_reads_right(
    stock: Pair, stock_requests: EngineRequests
) -> None:
    prompt = stock.tokens(20 * BLOCK)
    history = [*prompt, *stock.decode.complete(prompt, None, 50).tokens]
    count = len(history) // BLOCK * BLOCK
    kept = await keep(stock_requests, history[: count + 1])
    assert (kept.token_count, len(kept.block_ids), kept.computed_count) == (count + 1, count // BLOCK + 1, 1)
    assert (kept.expiry, kept.tp_size) == (None, 1)
    handle = {
        **kept.params,
        "remote_num_tokens": count,
        "remote_block_ids": [kept.block_ids[: count // BLOCK]],
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_blocks_expiry_time": stock.decode.clock() + 30,
    }
    following = [*history, *stock.tokens(20)]
    warm = stock.prefill.complete(following, handle, 8)
    assert warm.body["usage"]["prompt_tokens_details"]["cached_tokens"] == count
    assert warm.tokens == stock.alone(following, 8)
    stock.prefill.nixl.release(warm.params["remote_request_id"])
    stock.decode.eventually_free()


async def test_the_connector_says_how_long_a_handle_is_kept(pair: Pair) -> None:
    prompt = pair.tokens(10 * BLOCK)
    pair.decode.complete(prompt, None, 2, cache_salt="pepper")
    async with EngineRequests(pair.decode.url, api_key="") as requests:
        kept = await keep(requests, prompt, "pepper")
    assert kept.expiry is not None
    assert 0 < kept.expiry - pair.decode.clock() <= pair.decode.lease_s
    assert kept.computed_count == BLOCK, "the block of the last token is computed anew"
    assert pair.decode.retained() == [], "a handle is no block set"
    pair.decode.nixl.release(kept.hand_off_id)
    pair.decode.eventually_free()
