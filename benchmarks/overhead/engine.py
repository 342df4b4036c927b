"""A server with the surface of vLLM's that computes nothing: `python -m benchmarks.overhead.engine PORT`.

As a prefill engine it answers with a hand-off, as a decode engine with as many events as tokens are asked for: all at
once, or, with ``vllm_xargs: {"gap_s": ...}``, one in so many seconds, all streams in step, as an engine's batches go.
Events say in ``created`` when they were sent, by the machine's monotonic clock, nanoseconds.
"""

import asyncio
import math
import sys
import time

import msgspec
import uvloop
from aiohttp import web

from backhaul_local.ports import HOST

MODEL = "stub"

_HAND_OFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[*range(32)]],
    "remote_engine_id": "prefill-1-engine",
    "remote_request_id": "chatcmpl-0",
    "remote_host": HOST,
    "remote_port": 5600,
    "remote_num_tokens": 500,
    "tp_size": 1,
    "backhaul": {"prompt": 500, "local": 0, "read": 0},
}
_WHOLE = msgspec.json.encode(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 1, "total_tokens": 501},
        "kv_transfer_params": _HAND_OFF,
    }
)
_EVENT = (
    b'data: {"id":"chatcmpl-8d3f9a7be2c84f0c9e5b","object":"chat.completion.chunk","created":%d,"model":"stub",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"


class _Asked(msgspec.Struct):
    stream: bool = False
    max_tokens: int = 1
    vllm_xargs: dict[str, float] = {}


_asked_in = msgspec.json.Decoder(_Asked).decode


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    body = await request.read()
    if request.method == "GET":
        return web.Response()
    asked = _asked_in(body)
    if not asked.stream:
        return web.Response(body=_WHOLE, content_type="application/json")
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    gap_s = asked.vllm_xargs.get("gap_s", 0.0)
    step = math.ceil(time.monotonic() / gap_s) if gap_s else 0
    for number in range(step, step + asked.max_tokens):
        if gap_s:
            await asyncio.sleep(number * gap_s - time.monotonic())
        await response.write(_EVENT % time.monotonic_ns())
    await response.write(_DONE)
    return response


async def _serve(port: int) -> None:
    runner = web.ServerRunner(web.Server(_answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
