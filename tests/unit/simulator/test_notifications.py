"""The stand-in for NIXL's notifications."""

import json
from collections.abc import Iterator

import pytest

from backhaul_simulator.notifications import NixlError, nixl_agent, nixl_agent_config
from tests.fakes.eventually import eventually


@pytest.fixture
def agents() -> Iterator[tuple[nixl_agent, nixl_agent]]:
    """Two agents; the second does not know the first."""
    sender, receiver = nixl_agent("sender"), nixl_agent("receiver")
    sender.add_remote_agent(receiver.get_agent_metadata())
    yield sender, receiver
    sender.close()
    receiver.close()


async def test_messages_arrive_whole_in_order_and_under_their_senders_name(
    agents: tuple[nixl_agent, nixl_agent],
) -> None:
    sender, receiver = agents
    sent = [b"a:1", b"HB:" + b"x" * 100_000, b"b:1"]
    for message in sent:
        sender.send_notif("receiver", message)
    got: list[bytes] = []

    def all_there() -> bool:
        for name, messages in receiver.get_new_notifs().items():
            assert name == "sender"
            got.extend(messages)
        return len(got) == len(sent)

    await eventually(all_there)
    assert got == sent
    assert receiver.get_new_notifs() == {}


def test_senders_are_told_the_host_where_an_agent_listens() -> None:
    receiver = nixl_agent("receiver", nixl_agent_config(listen_host="127.0.0.2"))
    sender = nixl_agent("sender")
    try:
        assert json.loads(receiver.get_agent_metadata())[1] == "127.0.0.2"
        sender.add_remote_agent(receiver.get_agent_metadata())
        sender.send_notif("receiver", b"a:1")
    finally:
        sender.close()
        receiver.close()


def test_nothing_can_be_sent_to_a_peer_that_is_not_known(agents: tuple[nixl_agent, nixl_agent]) -> None:
    sender, receiver = agents
    with pytest.raises(NixlError, match="no remote agent"):
        receiver.send_notif("sender", b"a:1")
    sender.remove_remote_agent("receiver")
    with pytest.raises(NixlError, match="no remote agent"):
        sender.send_notif("receiver", b"a:1")


def test_sending_never_blocks_when_nobody_takes_the_messages(agents: tuple[nixl_agent, nixl_agent]) -> None:
    sender, _ = agents
    for _ in range(200):
        sender.send_notif("receiver", b"x" * 65_536)


def test_sending_to_an_agent_that_is_gone_is_an_error() -> None:
    sender, receiver = nixl_agent("sender"), nixl_agent("receiver")
    sender.add_remote_agent(receiver.get_agent_metadata())
    receiver.close()
    with pytest.raises(NixlError, match="cannot be reached"):
        sender.send_notif("receiver", b"a:1")
    sender.close()


def test_metadata_of_something_else_is_an_error(agents: tuple[nixl_agent, nixl_agent]) -> None:
    with pytest.raises(NixlError, match="cannot be read"):
        agents[0].add_remote_agent(b"\x80not json")


def test_senders_go_to_the_port_that_they_are_told() -> None:
    sender, between = nixl_agent("sender"), nixl_agent("receiver")
    _, _, port = json.loads(between.get_agent_metadata())
    receiver = nixl_agent("receiver", nixl_agent_config(advertised_port=port))
    sender.add_remote_agent(receiver.get_agent_metadata())
    sender.send_notif("receiver", b"a:1")
    assert between.get_new_notifs() == {"sender": [b"a:1"]}
    assert receiver.get_new_notifs() == {}
    for agent in (sender, between, receiver):
        agent.close()
