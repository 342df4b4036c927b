"""What pays is kept longer than the engine would keep it, and not for ever."""

import time

import pytest

from tests.e2e.retention.conftest import MAX_RETENTION_S, SOON_S, TTL_S
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import Chat
from tests.e2e.stack.conftest import conversation, eventually
from tests.engine_fixtures import REAL

pytestmark = pytest.mark.timeout(300)

_RENEWED_S = 5.0
"""More than what is left grows by, from one look to the next, for any other reason than a renewal."""


class Watch:
    """Counts how often the engine confirmed a later deadline."""

    def __init__(self, owner: Owner, *set_ids: str) -> None:
        self._owner = owner
        self._left_s: dict[str, float] = {}
        self.renewals = dict.fromkeys(set_ids, 0)

    def look(self) -> None:
        """Looks once."""
        for held in self._owner.sets():
            left_s = held.remaining_ttl.ToTimedelta().total_seconds()
            if left_s > self._left_s.get(held.set_id, left_s) + _RENEWED_S:
                self.renewals[held.set_id] += 1
            self._left_s[held.set_id] = left_s


# It lasts a minute; on simulated engines `test_budget` looks at renewals.
@pytest.mark.parametrize("kind", [REAL], indirect=True)
def test_a_conversation_is_warm_long_after_the_engines_own_time_and_let_go_at_the_end_of_the_agents(
    chat: Chat, owner: Owner
) -> None:
    messages, (first,) = conversation(chat)
    returning = owner.new_set()
    conversation(chat)
    silent = owner.new_set([returning])
    ended_at, used = time.monotonic(), owner.used()
    watch = Watch(owner, returning.set_id, silent.set_id)

    while time.monotonic() < ended_at + 2 * TTL_S or min(watch.renewals.values()) < 2:
        watch.look()
        # The engine neither forgets a block nor takes one more.
        assert owner.used() == used
        assert time.monotonic() < ended_at + MAX_RETENTION_S, watch.renewals
        time.sleep(0.3)
    reply = chat.send(messages)

    assert (reply.route, reply.miss, reply.text) == ("warm", "", chat.cold(messages))
    assert reply.local + reply.read >= first.prompt
    newer = owner.new_set([silent])
    eventually(lambda: silent.set_id not in {held.set_id for held in owner.sets()}, within_s=MAX_RETENTION_S)
    assert time.monotonic() - ended_at >= MAX_RETENTION_S - 5
    eventually(lambda: owner.used() == newer.block_count, within_s=SOON_S)
