"""When an engine is asked for a fresh handle, what becomes of the answer, and which pointers lead here."""

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from backhaul_common.errors import BackhaulError, UnavailableError
from backhaul_connector.anchors import Anchors, identity_of, verified_count
from backhaul_node_agent import convert
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.cached import Stored
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.core.life import Limits
from backhaul_node_agent.core.node import ServerFacts
from backhaul_node_agent.engine_requests import Kept
from backhaul_node_agent.harvest import MARGIN_S, Harvest, HarvestRequest
from tests.fakes import block_sets
from tests.fakes.clock import FakeClock, settle

BLOCK = 16
CACHED = 20 * BLOCK
PROMPT = list(range(CACHED + 5))
ENGINE_AHEAD_S = 1000.0
LEASE_S = 30.0

pytestmark = pytest.mark.timeout(20)


@dataclass
class FakeOwner:
    draining: bool = False
    valid: bool = True
    facts: list[EngineFacts] = field(default_factory=list)
    clocks: dict[str, EngineClock] = field(default_factory=dict)

    def engines(self) -> Sequence[EngineFacts]:
        return self.facts

    def lease_valid(self, now: float) -> bool:
        return self.valid

    def clock(self, engine_id: str) -> EngineClock | None:
        return self.clocks.get(engine_id)


@dataclass
class FakeEvents:
    followed: set[int] = field(default_factory=set)
    there: bool = True

    def follow(self, rank: int) -> None:
        self.followed.add(rank)

    def connected(self, rank: int) -> bool:
        return self.there


@dataclass
class FakePointers:
    known: dict[str, BlockSet] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def publish(self, engine_id: str, block_set: BlockSet) -> None:
        self.known[block_set.set_id] = block_set

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None:
        del self.known[block_set.set_id]

    def forget(self, engine_id: str) -> None:
        self.forgotten.append(engine_id)


@dataclass
class FakeRequests:
    """An engine that answers at once what it was made to."""

    answer: Callable[[Sequence[int]], Kept]
    asked: list[dict[str, Any]] = field(default_factory=list)
    failure: Exception | None = None
    silent: bool = False
    aborted: int = 0

    async def keep(
        self, *, model: str, token_ids: Sequence[int], salt: str, rank: int | None, left_over: Callable[[Kept], None]
    ) -> Kept:
        self.asked.append({"model": model, "token_ids": list(token_ids), "salt": salt, "rank": rank})
        if self.failure is not None:
            raise self.failure
        if self.silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        return self.answer(token_ids)


def kept(token_ids: Sequence[int]) -> Kept:
    count = len(token_ids)
    params = block_sets.engine_params("hand-off-1", count, BLOCK, remote_blocks_expiry_time=None)
    return Kept(
        params=params,
        engine_id="engine-1",
        hand_off_id="hand-off-1",
        block_ids=params["remote_block_ids"][0],
        token_count=count,
        tp_size=2,
        expiry=None,
        computed_count=1,
    )


class Scene:
    """One engine without the connector that caches the start of the prompt."""

    def __init__(
        self, *, weights_digest: str = "weights", followed: bool = True, rank: int = 0, ranks: Collection[int] = ()
    ) -> None:
        """`rank` is the engine's, `ranks` are all of its server's."""
        self.rank = rank
        self.owner, self.events, self.pointers = FakeOwner(), FakeEvents(), FakePointers()
        self.requests = FakeRequests(kept)
        self.clock = FakeClock()
        self.server = ServerFacts(True, ("model", "poet"), ("model",), "0.32.0", "")
        self.released: list[ev.SendRelease] = []
        self.harvest = Harvest(
            owner=self.owner,
            events=self.events if followed else None,
            requests=self.requests,
            pointers=self.pointers,
            release=self.released.append,
            server=lambda: self.server,
            clock=self.clock,
            limits=Limits(),
            weights_digest=weights_digest,
            engine_lease_s=LEASE_S,
            ranks=lambda: ranks,
        )
        self.meet()
        self.cache(0, PROMPT[:CACHED])

    def meet(self, engine_id: str = "engine-1", rank: int | None = None) -> None:
        now = self.clock.monotonic()
        self.harvest.on_engine(self.rank if rank is None else rank, engine_id, now, now + ENGINE_AHEAD_S, now)

    def cache(self, sequence: int, tokens: list[int], *, salt: str = "", session: str | None = None) -> None:
        blocks = [f"{sequence}-{number}".encode() for number in range(len(tokens) // BLOCK)]
        extra = [[salt] if salt and number == 0 else None for number in range(len(blocks))]
        stored = Stored(
            hashes=blocks, parent=None, token_ids=tokens, block_size=BLOCK, extra_keys=extra, session=session
        )
        self.harvest.on_changes(self.rank, sequence, [stored])

    async def refused(self, request: HarvestRequest, timeout_s: float = 1.0) -> str:
        with pytest.raises(BackhaulError) as caught:
            await self.harvest.harvest(request, timeout_s)
        return caught.value.reason


def request(**changed: Any) -> HarvestRequest:
    fields = {
        "set_id": "cached-set-1",
        "engine_id": "engine-1",
        "scope": "scope",
        "weights_digest": "weights",
        "model": "model",
        "cache_salt": "",
        "token_ids": PROMPT,
    }
    return HarvestRequest(**{**fields, **changed})


async def test_the_handle_covers_the_cached_blocks_and_proves_them() -> None:
    scene = Scene()
    harvested = await scene.harvest.harvest(request(), 1.0)
    assert scene.requests.asked == [{"model": "model", "token_ids": PROMPT[: CACHED + 1], "salt": "", "rank": None}]
    handle = json.loads(convert.handle(harvested.grant))
    assert (handle["remote_num_tokens"], len(handle["remote_block_ids"][0])) == (CACHED, CACHED // BLOCK)
    assert (handle["do_remote_decode"], handle["do_remote_prefill"]) == (True, False)
    assert (harvested.hand_off_id, harvested.computed_count) == ("hand-off-1", 1)
    proof = handle["backhaul"]
    identity = identity_of(weights_digest="weights", adapter="", cache_salt="", scope="scope")
    assert (proof["identity"], proof["token_count"]) == (identity.hex(), CACHED)
    anchors = Anchors(identity, proof["stride"], proof["spacing"], CACHED, bytes.fromhex(proof["anchors"]))
    assert verified_count(anchors, PROMPT) == CACHED


async def test_the_deadline_leaves_a_margin_to_the_engines_lease() -> None:
    scene = Scene()
    harvested = await scene.harvest.harvest(request(), 1.0)
    now = scene.clock.monotonic() + ENGINE_AHEAD_S
    assert harvested.grant.deadline == pytest.approx(now + LEASE_S - MARGIN_S, abs=0.1)
    assert harvested.grant.ttl_s == pytest.approx(LEASE_S - MARGIN_S, abs=0.1)


async def test_a_deadline_that_the_engine_states_counts_and_a_claim_is_never_longer() -> None:
    scene = Scene()
    now = scene.clock.monotonic() + ENGINE_AHEAD_S
    scene.requests.answer = lambda ids: replace(kept(ids), expiry=now + 20)
    harvested = await scene.harvest.harvest(request(), 1.0)
    assert harvested.grant.deadline == now + 20 - MARGIN_S
    scene.requests.answer = lambda ids: replace(kept(ids), expiry=now + 500)
    harvested = await scene.harvest.harvest(request(), 1.0)
    assert harvested.grant.ttl_s <= Limits().claim_ttl_s


async def test_the_salt_of_the_turn_is_that_of_the_blocks() -> None:
    scene = Scene()
    assert await scene.refused(request(cache_salt="pepper")) == "NOT_CACHED"
    scene.cache(1, PROMPT[:CACHED], salt="pepper")
    await scene.harvest.harvest(request(cache_salt="pepper"), 1.0)
    assert scene.requests.asked[-1]["salt"] == "pepper"


REFUSALS: dict[str, tuple[dict[str, Any], Callable[[Scene], None], str]] = {
    "engine-unknown": ({"engine_id": "engine-2"}, lambda scene: None, "ENGINE_UNKNOWN"),
    "draining": ({}, lambda scene: setattr(scene.owner, "draining", True), "DRAINING"),
    "lease": ({}, lambda scene: setattr(scene.owner, "valid", False), "LEASE_INVALID"),
    "weights": ({"weights_digest": "others"}, lambda scene: None, "WEIGHTS_MISMATCH"),
    "weights-unknown": ({"weights_digest": ""}, lambda scene: None, "WEIGHTS_MISMATCH"),
    "adapter": ({"model": "poet"}, lambda scene: None, "UNSUPPORTED_MODEL"),
    "model-unknown": ({"model": "other"}, lambda scene: None, "UNSUPPORTED_MODEL"),
    "few-tokens": ({"token_ids": PROMPT[:250]}, lambda scene: None, "NOT_CACHED"),
    "events-unreadable": ({}, lambda scene: scene.harvest.on_lost(0), "NOT_CACHED"),
    "restarted": ({}, lambda scene: scene.meet("engine-2"), "ENGINE_UNKNOWN"),
}


@pytest.mark.parametrize(("changed", "prepare", "reason"), REFUSALS.values(), ids=REFUSALS)
async def test_the_engine_is_not_asked_when(
    changed: dict[str, Any], prepare: Callable[[Scene], None], reason: str
) -> None:
    scene = Scene()
    prepare(scene)
    assert await scene.refused(request(**changed)) == reason
    assert scene.requests.asked == []


async def test_without_events_nothing_is_known() -> None:
    assert await Scene(followed=False).refused(request()) == "NO_EVENTS"


async def test_an_engine_whose_weights_nobody_vouches_for_is_not_asked() -> None:
    assert await Scene(weights_digest="").refused(request(weights_digest="")) == "WEIGHTS_MISMATCH"


async def test_an_engine_whose_clock_is_unknown_is_not_asked() -> None:
    scene = Scene()
    scene.meet("engine-2")
    scene.harvest.on_engine(0, "engine-3", 0.0, None, 0.0)
    assert await scene.refused(request(engine_id="engine-3")) == "CLOCK_UNKNOWN"


@pytest.mark.parametrize("timeout_s", [0.01, 0.06], ids=["for-the-engine", "for-the-answer-to-arrive"])
async def test_with_too_little_time_the_engine_is_not_asked_and_nothing_is_held_against_it(timeout_s: float) -> None:
    scene = Scene()
    assert await scene.refused(request(), timeout_s=timeout_s) == "DEADLINE_EXCEEDED"
    assert scene.requests.asked == []
    await scene.harvest.harvest(request(), 1.0)


async def test_an_engine_that_does_not_answer_in_time_is_left_alone_for_a_while() -> None:
    scene = Scene()
    scene.requests.silent = True
    assert await scene.refused(request(), timeout_s=0.08) == "DEADLINE_EXCEEDED"
    assert scene.requests.aborted == 1
    assert await scene.refused(request()) == "BACKED_OFF"
    await scene.clock.advance(1.1)
    scene.requests.silent = False
    await scene.harvest.harvest(request(), 1.0)


async def test_an_engine_that_fails_is_left_alone_for_a_while() -> None:
    scene = Scene()
    scene.requests.failure = UnavailableError("ENGINE_FAILED", "no")
    assert await scene.refused(request()) == "ENGINE_FAILED"
    assert await scene.refused(request()) == "BACKED_OFF"


async def test_a_guess_that_was_wrong_gives_its_handle_and_a_pause() -> None:
    scene = Scene()
    scene.requests.answer = lambda ids: replace(kept(ids), computed_count=3 * BLOCK)
    harvested = await scene.harvest.harvest(request(), 1.0)
    assert harvested.computed_count == 3 * BLOCK
    assert await scene.refused(request()) == "BACKED_OFF"


async def test_an_engine_is_asked_for_few_at_the_same_time() -> None:
    scene = Scene()
    scene.requests.silent = True
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(scene.harvest.harvest(request(), 1.0)) for _ in range(8)]
        await settle()
        assert await scene.refused(request()) == "BACKED_OFF"
        for task in tasks:
            task.cancel()
    scene.requests.silent = False
    await scene.harvest.harvest(request(), 1.0)


UNFIT: dict[str, Callable[[Scene, Sequence[int]], Kept]] = {
    "another-engine": lambda scene, ids: replace(kept(ids), engine_id="engine-2"),
    "other-tokens": lambda scene, ids: replace(kept(ids), token_count=7),
    "too-few-blocks": lambda scene, ids: replace(kept(ids), block_ids=[1]),
    "kept-too-shortly": lambda scene, ids: replace(kept(ids), expiry=scene.clock.monotonic() + ENGINE_AHEAD_S + 10),
}


@pytest.mark.parametrize("answer", UNFIT.values(), ids=UNFIT)
async def test_an_answer_that_does_not_fit_is_released(answer: Callable[[Scene, Sequence[int]], Kept]) -> None:
    scene = Scene()
    scene.requests.answer = lambda ids: answer(scene, ids)
    await scene.refused(request())
    (released,) = scene.released
    assert released.set_id == "hand-off-1"


async def test_what_is_answered_when_the_lease_is_gone_is_released() -> None:
    scene = Scene()

    def answer(ids: Sequence[int]) -> Kept:
        scene.owner.valid = False
        return kept(ids)

    scene.requests.answer = answer
    assert await scene.refused(request()) == "LEASE_INVALID"
    assert scene.released == [ev.SendRelease("engine-1", "hand-off-1")]


async def test_a_handle_can_be_given_back_by_its_name_until_it_has_ended() -> None:
    scene = Scene()
    assert not scene.harvest.release("engine-1", "hand-off-1")
    await scene.harvest.harvest(request(), 1.0)
    assert scene.harvest.release("engine-1", "hand-off-1")
    assert scene.released == [ev.SendRelease("engine-1", "hand-off-1")]
    assert scene.harvest.tp_size("engine-1") == 2
    await scene.clock.advance(LEASE_S + 1)
    scene.harvest.tick()
    assert not scene.harvest.release("engine-1", "hand-off-1")


async def test_a_conversation_that_is_over_leaves_no_pointer() -> None:
    scene = Scene()
    scene.harvest.let_go("engine-1", convert.block_set(block_sets.report("set-1", tokens=PROMPT)))
    assert not scene.harvest.drop("cached-set-2")
    assert scene.harvest.drop("cached-set-1")
    assert [*scene.pointers.known] == []
    assert not scene.harvest.drop("cached-set-1")


LONG = list(range(3 * CACHED))
"""What a conversation has become; the engine caches the first third of it."""


def let_go(scene: Scene, tokens: list[int]) -> None:
    identity = identity_of(weights_digest="weights", adapter="", cache_salt="", scope="scope")
    scene.harvest.let_go("engine-1", convert.block_set(block_sets.report("set-1", tokens=tokens, identity=identity)))


@pytest.mark.parametrize("more", [[1, 2, 3], []], ids=["next-turn", "same-turn"])
async def test_a_set_whose_blocks_are_gone_loses_its_pointer_to_the_turn_that_finds_out(more: list[int]) -> None:
    scene = Scene()
    let_go(scene, LONG)
    assert [*scene.pointers.known] == ["cached-set-1"]
    assert await scene.refused(request(token_ids=[*LONG, *more])) == "NOT_CACHED"
    assert scene.pointers.known == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": [7] * 3 * CACHED},
        {"token_ids": PROMPT[:CACHED]},
        {"token_ids": [*PROMPT[:CACHED], *[7] * CACHED]},
        {"cache_salt": "pepper", "token_ids": LONG},
    ],
    ids=["title", "shorter", "edited-history", "another-salt"],
)
async def test_a_request_that_does_not_show_what_is_gone_costs_no_pointer(changed: dict[str, Any]) -> None:
    scene = Scene()
    let_go(scene, LONG)
    assert await scene.refused(request(**changed)) == "NOT_CACHED"
    assert [*scene.pointers.known] == ["cached-set-1"]


async def test_the_last_block_of_a_prompt_is_not_taken_for_gone() -> None:
    scene = Scene()
    let_go(scene, PROMPT[: BLOCK * 12])
    assert await scene.refused(request(token_ids=PROMPT[: BLOCK * 12])) == "NOT_CACHED"
    assert [*scene.pointers.known] == ["cached-set-1"]


async def test_what_a_label_leads_to_is_not_known_and_not_dropped() -> None:
    scene = Scene()
    scene.cache(1, PROMPT[:BLOCK], session="backhaul:scope:key-1")
    (made,) = scene.pointers.known
    assert await scene.refused(request(set_id=made, token_ids=[7] * 300)) == "NOT_CACHED"
    assert [*scene.pointers.known] == [made]


async def test_labels_of_turns_become_pointers_once() -> None:
    scene = Scene()
    scene.cache(1, PROMPT[:BLOCK], session="backhaul:scope:key-1:key-2")
    scene.cache(2, PROMPT[:BLOCK], session="backhaul:scope:key-1:key-2")
    scene.cache(3, PROMPT[:BLOCK], session="a client's own")
    (made,) = scene.pointers.known.values()
    assert (made.keys, made.cached) == (("key-1", "key-2"), True)


async def test_a_pointer_goes_when_a_set_stands_in_for_it_when_it_is_old_and_when_the_node_drains() -> None:
    scene = Scene()
    held = convert.block_set(block_sets.report("set-1", tokens=PROMPT))
    scene.harvest.let_go("engine-1", held)
    scene.harvest.retained("engine-1", convert.block_set(block_sets.report("set-2", tokens=[*PROMPT, 1, 2, 3])))
    assert scene.pointers.known == {}
    scene.harvest.let_go("engine-1", held)
    await scene.clock.advance(Limits().max_retention_s + 1)
    scene.harvest.tick()
    assert scene.pointers.known == {}
    scene.harvest.let_go("engine-1", held)
    scene.owner.draining = True
    scene.harvest.tick()
    scene.harvest.let_go("engine-1", held)
    assert scene.pointers.known == {}


async def test_events_of_an_engine_that_has_restarted_may_come_before_its_name() -> None:
    scene = Scene()
    scene.cache(0, PROMPT[: CACHED - BLOCK])
    scene.meet("engine-2")
    scene.requests.answer = lambda ids: replace(kept(ids), engine_id="engine-2")
    harvested = await scene.harvest.harvest(request(engine_id="engine-2"), 1.0)
    assert harvested.grant.block_set.token_count == CACHED - BLOCK


async def test_the_pointers_of_an_engine_without_the_connector_end_with_it() -> None:
    scene = Scene()
    scene.meet("engine-2")
    assert scene.pointers.forgotten == ["engine-1"]
    scene.harvest.let_go("engine-1", convert.block_set(block_sets.report("set-1", tokens=PROMPT)))
    assert scene.pointers.known == {}


async def test_a_rank_among_several_is_named() -> None:
    scene = Scene()
    scene.meet("engine-9", rank=1)
    await scene.harvest.harvest(request(), 1.0)
    assert scene.requests.asked[-1]["rank"] == 0
    assert scene.events.followed == {0, 1}


@pytest.mark.parametrize(("rank", "ranks", "named"), [(0, (0, 1), 0), (5, (4, 5), 1), (1, (1,), None)])
async def test_a_rank_is_named_as_its_server_counts_it(rank: int, ranks: Collection[int], named: int | None) -> None:
    scene = Scene(rank=rank, ranks=ranks)
    await scene.harvest.harvest(request(), 1.0)
    assert scene.requests.asked[-1]["rank"] == named


def test_second_chances_are_offered_while_all_is_known_that_they_need() -> None:
    assert Scene().harvest.offered_engines() == ["engine-1"]
    assert Scene(weights_digest="").harvest.offered_engines() == []
    assert Scene(followed=False).harvest.offered_engines() == []
    scene = Scene()
    scene.events.there = False
    assert scene.harvest.offered_engines() == []
