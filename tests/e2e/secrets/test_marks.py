"""What clients say and what operators keep secret is in no log, no span, no metric, no key of etcd and no error.

All services run with debug logs and traces. Prompts, ids, salts and keys carry marks that nothing else has; turns
succeed, are refused, fail at engines and break off in the middle; then everything that was left behind is searched.
"""

import base64
import hashlib
import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from backhaul_local.engines import MODEL_NAME
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, answered
from tests.e2e.stack.conftest import eventually
from tests.fakes.otlp_collector import OtlpCollector

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]

_SERVICES = ("router", "registry", "agent", "etcd")


class Marks:
    """Texts that are nowhere else."""

    def __init__(self) -> None:
        self.all: dict[str, str] = {}

    def new(self, name: str) -> str:
        """Returns a new one, of this name."""
        return self.all.setdefault(name, f"mark{secrets.token_hex(12)}")

    def add(self, name: str, text: str) -> None:
        """Looks for this text, too."""
        self.all[name] = text

    def found_in(self, data: bytes) -> list[str]:
        """Returns the names of those that are there, as they are or in another guise."""
        return [name for name, text in self.all.items() if any(guise in data for guise in _guises(text))]


def _guises(text: str) -> Iterator[bytes]:
    raw = text.encode()
    yield raw
    yield raw.hex().encode()
    yield quote(text).encode()
    yield json.dumps(text)[1:-1].encode()
    # Base64 of a text that begins anywhere: all but its ends is the same in one of three ways.
    for skip in range(3):
        yield base64.b64encode(raw[skip : skip + (len(raw) - skip) // 3 * 3])


@pytest.fixture(scope="module")
def marks() -> Marks:
    return Marks()


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(marks: Marks, collector: OtlpCollector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("secrets")
    engine_key = marks.new("engine key")
    (folder / "engine.key").write_text(engine_key)
    (folder / "cluster.key").write_text(marks.new("cluster key") * 2)
    digest = hashlib.sha256(marks.new("tenant key").encode()).hexdigest()
    (folder / "tenants.toml").write_text(f'[tenants.acme]\nkey_sha256 = ["{digest}"]\n')
    debug = ["--log-level", "debug"]
    key = ["--engine-key-file", str(folder / "engine.key")]
    tenants = ["--tenants-file", str(folder / "tenants.toml"), "--cluster-key-file", str(folder / "cluster.key")]
    engine = SimulatedEngine(flags=["--api-key", engine_key, "--recompute-threshold", "1"])
    options = StackOptions(
        state=folder / "stack",
        prefill=[engine],
        decode=[engine],
        env={
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
        metrics=True,
        registry_flags=debug,
        agent_flags=[*debug, *key],
        router_flags=[*debug, *key, *tenants, "--prefer", "warm", "--lookup-budget-s", "1", "--explain"],
    )
    with Stack(options) as stack:
        yield stack


@pytest.fixture(scope="module")
def chat(stack: Stack, marks: Marks) -> Iterator[Chat]:
    headers = {
        "authorization": f"Bearer {marks.new('tenant key')}",
        "x-request-id": "id-of-the-client",
        "baggage": f"secret={marks.new('baggage')}",
        "traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
        "tracestate": marks.new("state of a trace"),
        "cookie": marks.new("cookie"),
        "x-something": marks.new("header"),
    }
    chat = Chat(stack.routers[0], headers=headers)
    yield chat
    chat.http.close()


def _opening(marks: Marks, name: str) -> list[dict[str, Any]]:
    story = f"the driver took {marks.new(name)} to the harbour and came back " * 20
    return [{"role": "system", "content": marks.new(f"system of {name}")}, {"role": "user", "content": story}]


def _script(stack: Stack, node: str, *faults: dict[str, Any]) -> None:
    """Tells a simulated engine what its next requests meet."""
    data = json.dumps({"next": list(faults)}).encode()
    request = urllib.request.Request(f"{stack.node(node).url}/simulator/faults", data=data, method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


def _succeeds(chat: Chat, marks: Marks) -> None:
    tool = {"type": "function", "function": {"name": marks.new("tool"), "parameters": {"type": "object"}}}
    messages = _opening(marks, "prompt")
    more: dict[str, Any] = {"cache_salt": marks.new("salt"), "user": marks.new("user"), "tools": [tool]}
    first = chat.send(messages, session=marks.new("session"), **more)
    assert first.status == 200, first.raw
    marks.add("reply", first.text[:60])
    again = answered(messages, first.text, marks.new("question"))

    def warm() -> bool:
        return chat.send(again, session=marks.new("session"), stream=False, **more).route == "warm"

    eventually(warm, 30)
    body = {"model": MODEL_NAME, "prompt": marks.new("completion"), "max_tokens": 5}
    answer = chat.http.post("/v1/completions", json={**body, "conversation_id": marks.new("conversation")})
    assert answer.status_code == 200, answer.text
    ended = chat.http.delete(f"/v1/conversations/{marks.new('session')}", params={"cache_salt": marks.new("salt")})
    assert ended.status_code == 200, ended.text


def _refused(chat: Chat, marks: Marks) -> list[httpx2.Response]:
    mark = marks.new("refused prompt")
    wrong = {"authorization": f"Bearer {marks.new('wrong key')}"}
    path, kind = "/v1/chat/completions", {"content-type": "application/json"}
    good = {"model": MODEL_NAME, "messages": [{"role": "user", "content": mark}]}
    return [
        chat.http.post(path, json=good, headers=wrong),
        chat.http.post(path, content=f'{{"model":"m","messages":["{mark}"'.encode(), headers=kind),
        chat.http.post(path, content=f'["{mark}"]'.encode(), headers=kind),
        chat.http.post(path, json={**good, "messages": [mark]}),
        chat.http.post(path, json={**good, "tools": mark}),
        chat.http.post(path, json={**good, "max_tokens": -1}),
        chat.http.post(path, json={**good, "messages": [{"role": "user", "content": [[mark]] * 60_000}]}),
        chat.http.post(path, json=good, headers={"x-session-id": marks.new("long session") * 30}),
        chat.http.post(path, content=b"x", headers={"content-type": mark}),
        chat.http.get(f"/{marks.new('path')}"),
        chat.http.delete(f"/v1/conversations/{marks.new('no session')}", headers=wrong),
    ]


_ODD_PATH = 9
"""Which of the refused requests is for a path that there is not."""


def _fails(stack: Stack, chat: Chat, marks: Marks) -> list[httpx2.Response]:
    """Faults of engines before and after the first byte, and the end of one in the middle of an answer."""
    answers = []
    for name, node, fault in (
        ("prefill fails", "prefill-1", {"fault": "bare_500"}),
        ("prefill breaks", "prefill-1", {"fault": "reset"}),
        ("decode fails", "decode-1", {"fault": "bare_500"}),
        ("decode cannot load", "decode-1", {"fault": "finish_error"}),
        ("decode breaks off", "decode-1", {"fault": "reset", "after": 3}),
        ("decode dies", "decode-1", {"fault": "die", "after": 3}),
    ):
        _script(stack, node, fault)
        body = {"model": MODEL_NAME, "messages": _opening(marks, name), "max_tokens": 20, "stream": True}
        answers.append(chat.http.post("/v1/chat/completions", json=body))
    return answers


def _shown(answer: httpx2.Response) -> bytes:
    """Returns what somebody on the way may log: the head, and the body of an error."""
    head = repr(sorted(answer.headers.items())).encode()
    return head + (answer.content if answer.status_code >= 400 else b"")


def _logs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(_SERVICES)}


def _metrics(stack: Stack) -> dict[str, bytes]:
    """Returns what each service shows of what it counts."""
    urls = {name: f"http://{address}/metrics" for name, address in stack.metrics.items()}
    return {f"metrics of {name}": httpx2.get(url, trust_env=False).content for name, url in urls.items()}


def _etcd(stack: Stack) -> bytes:
    """Returns all keys and values."""
    everything = {"key": base64.b64encode(b"\0").decode(), "range_end": base64.b64encode(b"\0").decode()}
    request = urllib.request.Request(
        f"http://{stack.etcd_endpoints[0]}/v3/kv/range", data=json.dumps(everything).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        kvs = json.load(response)["kvs"]
    return b"\n".join(base64.b64decode(kv[part]) for kv in kvs for part in ("key", "value"))


def test_nothing_of_clients_and_no_secret_is_left_anywhere(
    stack: Stack, chat: Chat, marks: Marks, collector: OtlpCollector
) -> None:
    _succeeds(chat, marks)
    kept = _etcd(stack)
    answers = [*_refused(chat, marks), *_fails(stack, chat, marks)]
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404, 415}
    eventually(lambda: b"decode" in collector.raw and b"turn" in collector.raw, 15)
    places = {
        **_logs(stack.logs),
        "spans": collector.raw,
        "etcd": kept + _etcd(stack),
        **_metrics(stack),
        **{f"answer {number}": _shown(answer) for number, answer in enumerate(answers)},
    }
    assert b'"level": "debug"' in places["agent-decode-1.log"] + places["router-1.log"]
    assert b'result="broken"' in places["metrics of router-1"]
    found = {place: marks.found_in(data) for place, data in places.items()}
    # Who asks for a path that there is not is told which.
    assert {place: names for place, names in found.items() if names} == {f"answer {_ODD_PATH}": ["path"]}


def test_a_mark_would_be_found_in_any_guise() -> None:
    marks = Marks()
    text = marks.new("x")
    assert marks.found_in(f"a{text}b".encode()) == ["x"]
    assert marks.found_in(text.encode().hex().encode()) == ["x"]
    for before in ("", "a", "ab"):
        assert marks.found_in(base64.b64encode(f"{before}{text}c".encode())) == ["x"]
    assert marks.found_in(b"mark") == []
