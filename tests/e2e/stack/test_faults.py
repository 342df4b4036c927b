"""Something dies in the middle of a conversation: the next turn is right and in time, and reuse comes back unaided."""

import time

import pytest

from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, Messages, answered
from tests.e2e.stack.conftest import (
    CLAIM_TTL_S,
    CONNECTOR_SOCKET,
    LEASE_TTL_S,
    conversation,
    eventually,
    eventually_warm,
)
from tests.soak.network import BreakableNetwork

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

IN_TIME_S = 15.0
"""For a turn that takes about one second on an idle machine: far below any time-out of a client."""


def _right_and_in_time(chat: Chat, messages: Messages) -> Messages:
    started = time.monotonic()
    reply = chat.send(messages)
    assert time.monotonic() - started < IN_TIME_S
    assert (reply.status, reply.text) == (200, chat.cold(messages)), reply.raw
    return answered(messages, reply.text)


@pytest.mark.parametrize("name", ["agent-decode-1", "agent-prefill-1"])
def test_a_killed_agent(chat: Chat, stack: Stack, name: str) -> None:
    messages, _ = conversation(chat)
    stack.kill(name)

    messages = _right_and_in_time(chat, messages)
    # The node's record goes with the agent's lease; its engine serves on.
    time.sleep(LEASE_TTL_S + 1)
    messages = _right_and_in_time(chat, messages)
    stack.restart(name, wait=False)
    messages = _right_and_in_time(chat, messages)

    eventually_warm(chat, within_s=LEASE_TTL_S + CLAIM_TTL_S + 20)
    _right_and_in_time(chat, messages)


def test_a_killed_registry(chat: Chat, stack: Stack) -> None:
    messages, _ = conversation(chat)
    stack.kill("registry-1")

    messages = _right_and_in_time(chat, messages)
    eventually_warm(chat, within_s=30)

    stack.restart("registry-1")
    _right_and_in_time(chat, messages)
    eventually_warm(chat, within_s=30)


def test_an_etcd_that_is_killed_and_restarted_on_its_data(chat: Chat, stack: Stack) -> None:
    messages, _ = conversation(chat)
    stack.kill("etcd")

    messages = _right_and_in_time(chat, messages)
    time.sleep(LEASE_TTL_S + 1)
    messages = _right_and_in_time(chat, messages)

    stack.restart("etcd")
    eventually_warm(chat, within_s=45)
    _right_and_in_time(chat, messages)


def test_a_cut_connector_socket(chat: Chat, network: BreakableNetwork) -> None:
    messages, _ = conversation(chat)
    socket = network.link(CONNECTOR_SOCKET)
    socket.cut()

    messages = _right_and_in_time(chat, messages)
    socket.heal()

    eventually_warm(chat, within_s=CLAIM_TTL_S + 20)
    _right_and_in_time(chat, messages)


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_an_engine_that_restarts_under_the_same_address(chat: Chat, stack: Stack, name: str) -> None:
    messages, _ = conversation(chat)
    stack.kill(name)

    assert chat.send(messages).status in (200, 502, 503)
    stack.restart(name)

    eventually(lambda: chat.send(messages).status == 200, within_s=60)
    messages = _right_and_in_time(chat, messages)
    eventually_warm(chat, within_s=60)
