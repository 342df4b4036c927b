"""What clients send of what is the router's to say reaches no engine and steers nothing; no word of theirs is kept."""

import json
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_router import turns
from tests.fakes.engine import FakeEngine, Leg, bare_500, reset
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key

MARK = "mark-of-the-client"

STEERING = {
    "x-data-parallel-rank": "7",
    "x-session-id": MARK,
    "x-conversation-id": MARK,
    "x-request-id": MARK,
    "x-gateway-destination-endpoint": f"{MARK}:80",
    "x-gateway-destination-endpoint-subset": f"{MARK}:80",
    "x-gateway-destination-endpoint-served": f"{MARK}:80",
    "x-backhaul-route": MARK,
    "x-backhaul-source": MARK,
    "x-priority": MARK,
    "baggage": f"a={MARK}",
    "b3": MARK,
    "cookie": MARK,
    "forwarded": f"for={MARK}",
    "x-forwarded-for": MARK,
    "via": MARK,
    "te": "trailers",
    "proxy-authorization": MARK,
    "x-envoy-original-path": MARK,
    "user-agent": MARK,
}
"""What vLLM, Envoy, endpoint pickers and proxies go by."""

NAMED = {
    "kv_transfer_params": {"remote_host": MARK, "do_remote_prefill": True, "backhaul": {"keys": [MARK], "scope": MARK}},
    "ec_transfer_params": {"remote_host": MARK},
    "request_id": MARK,
    "session_id": MARK,
    "vllm_xargs": {"kv_transfer_params": MARK, "request_id": MARK, "session_id": MARK},
}

FROM_THE_ROUTER = {
    "host",
    "accept",
    "accept-encoding",
    "content-type",
    "content-length",
    "transfer-encoding",
    "user-agent",
    "x-request-id",
    "x-data-parallel-rank",
    "traceparent",
}
"""All that engines are told in heads, but for keys."""


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def _check(legs: list[Leg]) -> None:
    assert legs
    for leg in legs:
        assert {name.lower() for name in leg.headers} <= FROM_THE_ROUTER
        assert leg.headers["x-data-parallel-rank"] == "0"
        assert MARK not in str(leg.headers) + leg.raw.decode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_headers_and_fields_that_are_the_routers_to_set_reach_no_engine(stack: RouterStack, stream: bool) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    cold = await stack.chat("hi", headers=STEERING, stream=stream, **NAMED)
    warm = await stack.chat("hi", "hello", "more", headers=STEERING, stream=stream, **NAMED)
    assert [answer.route for answer in (cold, warm)] == ["cold", "warm"]
    assert cold.headers["x-request-id"] == MARK
    _check([*stack.prefill.legs, *stack.decode.legs])


async def test_metadata_that_is_the_routers_to_set_reaches_no_engine(stack: RouterStack) -> None:
    request = router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body("hi", **NAMED)).encode())
    sent = {name: value for name, value in STEERING.items() if name not in ("te", "user-agent")}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        assert [step async for step in stub.ChatCompletions(request, metadata=tuple(sent.items()), timeout=10)]
    _check([*stack.prefill.legs, *stack.decode.legs])


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Collects what routers count that are made in the test."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield reader
    provider.shutdown()


async def test_no_word_of_a_client_is_in_a_metric_a_span_a_log_or_an_error(
    reader: InMemoryMetricReader, spans: InMemorySpanExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = FakeEngine("prefill", api_key=MARK), FakeEngine("decode", api_key=MARK)
    headers = {**STEERING, "x-request-id": "fine", "authorization": f"Bearer {MARK}"}
    async with router_stack(prefill=prefill, decode=decode) as stack:
        prefill.then(reset())
        decode.then(bare_500())
        assert (await stack.chat(MARK, headers=headers)).status == 200
        refused = [
            await stack.chat(MARK, headers={**headers, "authorization": f"Bearer {MARK}2"}),
            await stack.chat(MARK, headers=headers, tools=MARK),
            await stack.chat(MARK, headers=headers, n=MARK),
            await stack.post(CHAT, [MARK], headers),
            await stack.post(f"/{MARK}", {}, headers),
        ]
    assert {answer.status for answer in refused} == {400, 401, 404}
    # But for the path that it asked for.
    assert [answer.status for answer in refused if MARK.encode() in answer.body] == [404]
    data = reader.get_metrics_data()
    assert data is not None
    told = "".join(capsys.readouterr()) + "".join(span.to_json() for span in spans.get_finished_spans())
    assert "backhaul.router" in data.to_json()
    assert "first_turn" in told
    assert MARK not in data.to_json() + told


async def test_what_a_turn_was_about_is_in_neither_log_nor_span_when_the_router_itself_fails(
    stack: RouterStack,
    spans: InMemorySpanExporter,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(body: object, *_: object, **__: object) -> None:
        content = str(body)
        assert MARK in content
        raise LookupError("a fault of the router")

    monkeypatch.setattr(turns, "keys_of", fails)
    headers = {"authorization": f"Bearer {MARK}", "x-session-id": MARK}
    answer = await stack.chat(MARK, headers=headers)
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "internal error")
    told = "".join(capsys.readouterr()) + caplog.text
    assert "a fault of the router" in told
    assert MARK not in told + str(answer.headers) + "".join(span.to_json() for span in spans.get_finished_spans())
