"""What nobody needs any more is freed at once: findable no longer, then freed, and nothing but that."""

import json
import time
import uuid
from collections.abc import Callable

import grpc
import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_local.engines import MODEL_NAME
from backhaul_local.stack import Stack
from tests.e2e.retention.conftest import SOON_S, Foreign
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import Chat, Messages, answered
from tests.e2e.stack.conftest import conversation, eventually

pytestmark = pytest.mark.timeout(180)

FROZEN_S = 1.0
"""How long a registry does not answer; shorter than a node's lease."""


def _delete(chat: Chat, _stack: Stack, session: str, _messages: Messages) -> int:
    answer = chat.http.delete(f"/v1/conversations/{session}")
    assert answer.status_code == 200, answer.text
    return int(answer.json()["released"])


def _end_by_body(_chat: Chat, stack: Stack, _session: str, messages: Messages) -> int:
    body = json.dumps({"model": MODEL_NAME, "messages": messages}).encode()
    with grpc.insecure_channel(stack.grpc_routers[0], options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        return stub.EndConversation(router_pb2.EndConversationRequest(body=body), timeout=30).released_count


@pytest.mark.parametrize("end", [pytest.param(_delete, id="DELETE"), pytest.param(_end_by_body, id="EndConversation")])
def test_a_conversation_that_ends_frees_its_blocks_and_only_those(
    chat: Chat, owner: Owner, stack: Stack, foreign: Foreign, end: Callable[[Chat, Stack, str, Messages], int]
) -> None:
    session = uuid.uuid4().hex if end is _delete else ""
    messages, _ = conversation(chat, session=session)
    held = owner.new_set()
    assert owner.used() == held.block_count + foreign.block_count

    # The last turn's messages, without the answer to it and the question after it.
    released = end(chat, stack, session, messages[:-2])

    eventually(lambda: owner.used() == foreign.block_count, within_s=SOON_S)
    assert released == 1
    assert (owner.sets(), owner.pointers(held)) == ([], 0)
    reply = chat.send(messages, session=session)
    assert (reply.route, reply.read, reply.text) == ("cold", 0, chat.cold(messages))
    eventually(lambda: owner.used() == foreign.block_count + owner.sets()[0].block_count, within_s=SOON_S)


def test_nothing_is_freed_that_can_still_be_found(chat: Chat, owner: Owner, stack: Stack) -> None:
    conversation(chat)
    held = owner.new_set()
    eventually(lambda: owner.pointers(held) > 0, within_s=10)

    stack.freeze("registry-1")
    try:
        assert owner.release(held).released == [held.set_id]
        end = time.monotonic() + FROZEN_S
        while time.monotonic() < end:
            assert owner.used() == held.block_count
    finally:
        stack.thaw("registry-1")

    eventually(lambda: owner.used() == 0, within_s=SOON_S + 10)
    assert owner.pointers(held) == 0


def test_a_turn_that_could_not_find_the_one_before_it_makes_that_ones_blocks_needless(
    chat: Chat, owner: Owner, stack: Stack
) -> None:
    messages, _ = conversation(chat)
    older = owner.new_set()

    stack.freeze("registry-1")
    try:
        second = chat.send(messages)
    finally:
        stack.thaw("registry-1")

    assert (second.status, second.route, second.miss) == (200, "cold", "lookup_timeout")
    eventually(lambda: older.set_id not in {held.set_id for held in owner.sets()}, within_s=SOON_S + 10)
    newer = owner.new_set()
    eventually(lambda: owner.used() == newer.block_count, within_s=SOON_S)
    third = chat.send(answered(messages, second.text))
    assert (third.route, third.text) == ("warm", chat.cold(answered(messages, second.text)))


def test_a_turn_that_is_sent_again_is_retained_once(chat: Chat, owner: Owner) -> None:
    messages, _ = conversation(chat)
    older = owner.new_set()

    again = chat.send(messages[:-2])

    newer = owner.new_set([older])
    eventually(lambda: [held.set_id for held in owner.sets()] == [newer.set_id], within_s=SOON_S)
    eventually(lambda: owner.used() == newer.block_count, within_s=SOON_S)
    second = chat.send(messages)
    assert (again.status, second.route, second.text) == (200, "warm", chat.cold(messages))


def test_the_request_for_a_title_costs_a_conversation_nothing(chat: Chat, owner: Owner) -> None:
    session = uuid.uuid4().hex
    messages, _ = conversation(chat, session=session)
    held = owner.new_set()

    title = [{"role": "user", "content": f"Give this conversation a title: {messages[1]['content'][32:]}"}]
    titled = chat.send(title, session=session, tokens=8)
    owner.new_set([held])
    # As long as anything that follows from it may take.
    time.sleep(SOON_S)

    assert titled.status == 200
    assert held.set_id in {one.set_id for one in owner.sets()}
    second = chat.send(messages, session=session)
    assert (second.route, second.text) == ("warm", chat.cold(messages))
