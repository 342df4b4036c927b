"""When an engine is asked to keep a set longer.

A heartbeat moves a deadline to two thirds of ``kv_lease_duration`` from now, if that is later (nixl/base_worker.py,
`_lease_extension`). It is not acknowledged: only what the engine confirms counts, so it is sent again until then.
"""

from dataclasses import dataclass

from backhaul_node_agent.core.block_set import EngineFacts
from backhaul_node_agent.core.life import Instant, Life, Limits, Pointer, State

MAX_PER_MESSAGE = 64
"""Sets that one heartbeat names."""
MAX_TRIES = 3
"""Heartbeats without effect after which something is wrong."""

_LOOK_S = 1.0
"""Until a renewal shows: the owner's tick, the engine's step, the connector's look at its leases."""


def extension_s(facts: EngineFacts) -> float:
    """Returns how long from its arrival a heartbeat keeps a set."""
    return facts.lease_s * 2 // 3


def least_s(limits: Limits) -> float:
    """Returns the time that must be left when a set is renewed, so that it can always be claimed."""
    return limits.least_left_s + limits.margin_s + 2 * _LOOK_S


def threshold_s(facts: EngineFacts, limits: Limits) -> float:
    """Returns with how much time left a set is renewed: enough for a whole claim, where heartbeats reach that far."""
    whole = limits.claim_ttl_s + limits.margin_s + 2 * _LOOK_S
    return max(least_s(limits), min(whole, extension_s(facts) / 2))


def problem(facts: EngineFacts, limits: Limits) -> str:
    """Returns what keeps an engine's sets from being claimable all the time, with the remedy; empty when nothing."""
    least = least_s(limits)
    if facts.ttl_s <= least:
        return (
            f"decoder_kv_blocks_ttl is {facts.ttl_s:g} s: blocks are gone before they can be asked for or renewed; "
            f"set it to more than {least:g} in kv_connector_extra_config (480 is vLLM's default)"
        )
    if extension_s(facts) <= least:
        return (
            f"kv_lease_duration is {facts.lease_s:g} s: a renewal keeps blocks for {extension_s(facts):g} s, too short "
            f"to claim them; set it to more than {least * 3 / 2:g} in kv_connector_extra_config (180 is recommended)"
        )
    return ""


@dataclass(frozen=True, slots=True)
class _Asked:
    deadline: float
    """Engine's clock: what was confirmed when the renewal was sent."""
    at: float
    """Agent's clock."""
    tries: int


class Renewals:
    """What one engine was asked for."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}
        self._told = False

    def due(self, life: Life, at: Instant, facts: EngineFacts, limits: Limits) -> bool:
        """Tells whether a set needs a heartbeat now."""
        left_s = life.deadline - at.latest
        if not 0 < left_s <= threshold_s(facts, limits) or at.earliest + extension_s(facts) <= life.deadline:
            return False
        if life.state is not State.HELD or life.pointer is not Pointer.PUBLISHED or not at.owner:
            return False
        asked = self._asked.get(life.block_set.set_id)
        return asked is None or asked.deadline != life.deadline or at.local >= asked.at + limits.resend_s

    def sent(self, life: Life, at: Instant) -> None:
        """Notes a heartbeat for a set."""
        set_id = life.block_set.set_id
        before = self._asked.get(set_id)
        tries = before.tries + 1 if before is not None and before.deadline == life.deadline else 1
        self._asked[set_id] = _Asked(life.deadline, at.local, tries)

    def gone(self, set_id: str) -> None:
        """Forgets a set."""
        self._asked.pop(set_id, None)

    def in_vain(self, set_id: str) -> bool:
        """Tells, once per engine, that it has not moved a deadline although it was asked several times."""
        asked = self._asked.get(set_id)
        if self._told or asked is None or asked.tries < MAX_TRIES:
            return False
        self._told = True
        return True
