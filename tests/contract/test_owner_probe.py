"""What the agent learns of an engine that starts, stumbles, changes or restarts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest
import zmq.asyncio

from backhaul_common.clock import SystemClock
from backhaul_node_agent import engine_probe
from backhaul_node_agent.core.bounds import MAX_TEXT_BYTES
from backhaul_node_agent.core.node import ServerFacts, SideChannelFacts
from backhaul_node_agent.engine_probe import EngineProbe, SideChannel, SideChannelError
from tests.fakes.eventually import eventually
from tests.fakes.side_channel import FakeSideChannel, handshake_payload
from tests.fakes.vllm_http import FakeVllmHttp


class FastClock(SystemClock):
    """Probes every few milliseconds."""

    def monotonic(self) -> float:
        return super().monotonic() * 100

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 100)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@dataclass
class Seen:
    """What a probe reported."""

    servers: list[ServerFacts] = field(default_factory=list)
    engines: dict[int, SideChannelFacts] = field(default_factory=dict)

    @property
    def server(self) -> ServerFacts:
        return self.servers[-1] if self.servers else ServerFacts()

    async def becomes(self, condition: Callable[[ServerFacts], bool]) -> None:
        await eventually(lambda: condition(self.server))


@contextlib.asynccontextmanager
async def probing(
    context: zmq.asyncio.Context, url: str, port: int, ranks: tuple[int, ...] = (0,), api_key: str = ""
) -> AsyncIterator[Seen]:
    seen = Seen()
    probe = EngineProbe(
        engine_url=url,
        side_channel=("127.0.0.1", port),
        channel=SideChannel(context),
        clock=FastClock(),
        ranks=lambda: ranks,
        stall_s=20.0,
        api_key=api_key,
    )
    running = asyncio.create_task(probe.run(seen.servers.append, seen.engines.__setitem__))
    try:
        yield seen
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_an_engine_is_healthy_only_when_health_and_models_are_known(context: zmq.asyncio.Context) -> None:
    with FakeSideChannel() as channel:
        async with FakeVllmHttp() as http:
            http.healthy = False
            async with probing(context, http.url, channel.port) as seen:
                await eventually(lambda: len(seen.servers) > 3)
                assert seen.server == ServerFacts(problem="the server's health check answers 503")
                http.healthy, http.models_status = True, 500
                await seen.becomes(lambda facts: facts.healthy)
                assert seen.server.models == ()
                http.models_status = 200
                await seen.becomes(lambda facts: facts == ServerFacts(True, ("model-1",), ("model-1",), "0.32.0", ""))


async def test_an_adapter_that_is_loaded_later_is_noticed(context: zmq.asyncio.Context) -> None:
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        await seen.becomes(lambda facts: facts.models == ("model-1",))
        http.models.append("adapter-1")
        await seen.becomes(lambda facts: facts.models == ("model-1", "adapter-1"))


async def test_a_long_list_of_models_that_comes_in_pieces_is_read_whole(context: zmq.asyncio.Context) -> None:
    async with FakeVllmHttp() as http:
        http.models += [f"adapter-{number}-{'x' * 900}" for number in range(500)]
        http.piece_bytes = 10_000
        async with probing(context, http.url, 1) as seen:
            await seen.becomes(lambda facts: facts.models == tuple(http.models))


async def test_a_server_that_does_not_answer_keeps_its_models(context: zmq.asyncio.Context) -> None:
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        await seen.becomes(lambda facts: bool(facts.models))
        http.healthy = False
        await seen.becomes(lambda facts: not facts.healthy)
        assert seen.server.models == ("model-1",)


async def test_a_server_that_is_gone_is_said_to_be_in_words(context: zmq.asyncio.Context) -> None:
    async with FakeVllmHttp() as http:
        url = http.url
    async with probing(context, url, 1) as seen:
        await seen.becomes(lambda facts: facts.problem == "the server does not answer: nobody listens at its address")


async def test_a_server_that_is_late_is_healthy_until_it_is_late_three_times_in_a_row(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_probe, "_HTTP_S", 0.2)
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        await seen.becomes(lambda facts: facts.healthy)
        http.late_count = 2
        answers = len(seen.servers)
        await eventually(lambda: not http.late_count and len(seen.servers) > answers + 2)
        assert all(facts.healthy for facts in seen.servers)
        http.late_count = 3
        await seen.becomes(lambda facts: facts.problem == "the server does not answer: 3 time-outs in a row")
        await seen.becomes(lambda facts: facts.healthy)


async def test_an_engine_that_is_stuck_behind_a_healthy_server_is_not_healthy_until_it_moves(
    context: zmq.asyncio.Context,
) -> None:
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        await seen.becomes(lambda facts: facts.healthy)
        http.metrics = figures(running=0, waiting=3, tokens=100)
        await seen.becomes(lambda facts: "made no progress for 20 s" in facts.problem)
        assert not seen.server.healthy
        http.metrics = figures(running=3, waiting=0, tokens=101)
        await seen.becomes(lambda facts: facts.healthy)
        http.metrics = ""
        answers = len(seen.servers)
        await eventually(lambda: len(seen.servers) > answers + 40)
        assert seen.server.healthy


def figures(*, running: int, waiting: int, tokens: int) -> str:
    """Returns what vLLM's /metrics says."""
    labels = '{engine="0",model_name="model-1"}'
    return (
        f"# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        f"vllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} {waiting}.0\n"
        f"vllm:generation_tokens_total{labels} {tokens}.0\n"
    )


async def test_a_server_that_asks_for_a_key_names_its_models_to_its_agent(context: zmq.asyncio.Context) -> None:
    """vLLM's ``--api-key`` guards all under /v1 (entrypoints/serve/middleware/authenticate.py)."""
    async with FakeVllmHttp() as http:
        http.api_key = "secret"
        async with probing(context, http.url, 1, api_key="secret") as seen:
            await seen.becomes(lambda facts: facts.healthy and facts.models == ("model-1",))


async def test_a_server_cannot_send_its_agent_elsewhere(context: zmq.asyncio.Context) -> None:
    async with FakeVllmHttp() as elsewhere, FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        http.moved_to = f"{elsewhere.url}/health"
        await seen.becomes(lambda facts: facts.problem == "the server's health check answers 307")
        assert elsewhere.requests == []


async def test_a_proxy_in_the_environment_is_ignored(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        await seen.becomes(lambda facts: facts.healthy)


async def test_every_rank_is_asked_on_its_own_port(context: zmq.asyncio.Context) -> None:
    with FakeSideChannel() as channel:
        # The fake is rank 2's; ranks 0 and 1 do not answer.
        async with probing(context, "http://127.0.0.1:9", channel.port - 2, (0, 1, 2)) as seen:
            await eventually(lambda: 2 in seen.engines, timeout_s=10)
        assert seen.engines == {2: SideChannelFacts("engine-1", "compatible", 32, 1000)}
        assert channel.asked[0] == [b"get_meta_msg", 0, 0]


async def test_a_restarted_engine_is_noticed_by_its_id(context: zmq.asyncio.Context) -> None:
    with FakeSideChannel() as channel:
        async with probing(context, "http://127.0.0.1:9", channel.port) as seen:
            await eventually(lambda: 0 in seen.engines)
            channel.engine_id = "engine-2"
            await eventually(lambda: seen.engines[0].engine_id == "engine-2")


async def test_a_side_channel_that_answers_garbage_is_an_error(context: zmq.asyncio.Context) -> None:
    with FakeSideChannel() as channel:
        channel.parts = [b"\xc1", b"\xc1"]
        with pytest.raises(SideChannelError):
            await SideChannel(context).ask("127.0.0.1", channel.port)


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x91" * 100_000],
        [handshake_payload("")],
        [handshake_payload("e" * 5_000)],
        [handshake_payload("engine-1", num_blocks=2**40)],
        [handshake_payload("engine-1", num_blocks=-1)],
        [handshake_payload("engine-1", block_size=2**40)],
        [handshake_payload("engine-1", compatibility_hash="h" * 5_000)],
        [],
    ],
    ids=["deep", "no-id", "long-id", "many-blocks", "few-blocks", "large-blocks", "long-hash", "nothing"],
)
def test_a_side_channel_that_says_what_no_engine_does_is_an_error(parts: list[bytes]) -> None:
    with pytest.raises(SideChannelError):
        engine_probe._reply(parts)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"data":[7,{"id":8},{"id":""}],"version":{}}', b'"\\ud800"', b"\xff", b""],
    ids=["deep", "wrong-types", "half-a-letter", "no-text", "nothing"],
)
async def test_a_server_that_answers_what_no_server_does_keeps_its_models(
    context: zmq.asyncio.Context, body: bytes
) -> None:
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        await seen.becomes(lambda facts: bool(facts.models))
        http.body, answered = body, len(http.requests)
        await eventually(lambda: len(http.requests) > answered + 20)
        assert (seen.server.healthy, seen.server.models, seen.server.version) == (True, ("model-1",), "0.32.0")


async def test_a_long_version_is_cut(context: zmq.asyncio.Context) -> None:
    async with FakeVllmHttp() as http, probing(context, http.url, 1) as seen:
        http.body = b'{"version":"' + b"v" * 5_000 + b'"}'
        await seen.becomes(lambda facts: facts.version.startswith("vvv"))
        assert len(seen.server.version.encode()) <= MAX_TEXT_BYTES


async def test_a_side_channel_that_sends_without_end_is_cut_off(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_probe, "_MAX_REPLY_BYTES", 1_000)
    monkeypatch.setattr(engine_probe, "_SIDE_CHANNEL_S", 0.5)
    with FakeSideChannel() as channel:
        channel.parts = [handshake_payload("engine-1", agent_metadata=bytes(2_000))]
        with pytest.raises(SideChannelError, match="no answer"):
            await SideChannel(context).ask("127.0.0.1", channel.port)


async def test_a_side_channel_that_is_silent_is_given_up_in_time(context: zmq.asyncio.Context) -> None:
    with FakeSideChannel() as channel:
        channel.parts = []
        with pytest.raises(SideChannelError, match="no answer"):
            await SideChannel(context).ask("127.0.0.1", channel.port)


async def test_a_side_channel_that_finds_no_file_descriptor_is_an_error(context: zmq.asyncio.Context) -> None:
    context.set(zmq.MAX_SOCKETS, 1)
    with context.socket(zmq.REQ), pytest.raises(SideChannelError, match="Too many open files"):
        await SideChannel(context).ask("127.0.0.1", 1)
