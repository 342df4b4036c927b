"""Turns planned for a gateway: what they count as until they are over, and what becomes of their hand-off."""

from dataclasses import dataclass

import pytest

from backhaul_common.errors import BackhaulError, FailedPreconditionError, InvalidArgumentError
from backhaul_router.admission import Admission
from backhaul_router.core.engines import Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.core.health.breakers import BreakerState
from backhaul_router.core.plans import Step
from backhaul_router.core.queueing import TurnQueue
from backhaul_router.forwarding import Forwarded
from backhaul_router.planned_turns import PlannedTurns, Report
from tests.unit.router.ports import Bench, chat_request, ready

SEND_S, REPORT_S = 10.0, 60.0
HANDED_OFF = "ho"


@dataclass
class Scene:
    """Planned turns over fakes."""

    bench: Bench
    admission: Admission
    planned: PlannedTurns

    async def plan(self, *contents: str, **fields: object) -> tuple[str, Forwarded]:
        return await self.planned.plan(chat_request(*(contents or ("hi",)), **fields), left_s=100.0)

    async def tell(self, turn_id: str, *steps: Step, after_s: float = 0.0) -> bool:
        """Makes reports; tells whether the turn is over."""
        return [await self.planned.report(turn_id, "", Report(step, after_s=after_s)) for step in steps][-1]

    async def fail(self, turn_id: str, failure: Failure | None, status: int = 503) -> None:
        assert await self.planned.report(turn_id, "", Report(Step.FAILED, failure=failure, status=status))

    async def wait(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        await self.planned.look()

    @property
    def running(self) -> tuple[int, int, int]:
        """Turns, bytes and legs that count as running."""
        return self.admission.turn_count, self.admission.held_bytes, self.bench.live.load.total

    @property
    def freed(self) -> list[str]:
        """Names of the hand-offs that were freed."""
        return [kept.hand_off_id for kept in self.bench.owner.released]

    def state_of(self, forwarded: Forwarded) -> BreakerState:
        return self.bench.live.breakers.state(forwarded.leg.target.node)


@pytest.fixture
def scene() -> Scene:
    return scene_of(Bench())


def scene_of(bench: Bench) -> Scene:
    admission = Admission(
        turns=TurnQueue(max_turns=2, max_queued=0, limits={}),
        queue_timeout_s=1.0,
        max_held_bytes=10_000,
        clock=bench.clock,
    )
    planned = PlannedTurns(turns=bench.turns, admission=admission, clock=bench.clock, send_s=SEND_S, report_s=REPORT_S)
    return Scene(bench, admission, planned)


async def test_a_plan_is_the_decode_leg_with_what_prefill_handed_off(scene: Scene) -> None:
    _, forwarded = await scene.plan()

    assert len(scene.bench.engines.prefills) == 1
    assert scene.bench.engines.decodes == []
    assert forwarded.url in ("http://d1/v1/chat/completions", "http://d2/v1/chat/completions")
    assert b'"remote_request_id":"ho"' in forwarded.leg.body


async def test_a_turn_counts_until_it_is_done(scene: Scene) -> None:
    turn_id, _ = await scene.plan()
    counted = scene.running
    assert not await scene.tell(turn_id, Step.SENDING, Step.FIRST_BYTE)
    assert scene.running == counted
    assert await scene.tell(turn_id, Step.DONE)

    assert (counted[0], counted[2]) == (1, 1)
    assert scene.running == (0, 0, 0)
    assert scene.freed == [], "decode has read it"


async def test_planned_turns_count_towards_the_limit(scene: Scene) -> None:
    for _ in range(2):
        await scene.plan()

    with pytest.raises(ApiError) as refused:
        await scene.plan()
    assert refused.value.code == "too_many_turns"


@pytest.mark.parametrize("step", [Step.LEFT, Step.FAILED])
async def test_what_ends_before_it_is_sent_has_its_hand_off_freed(scene: Scene, step: Step) -> None:
    turn_id, _ = await scene.plan()
    await scene.tell(turn_id, step)

    assert scene.freed == [HANDED_OFF]
    assert scene.running == (0, 0, 0)


@pytest.mark.parametrize("step", [Step.LEFT, Step.FAILED, Step.DONE])
async def test_what_may_have_been_sent_has_not(scene: Scene, step: Step) -> None:
    turn_id, _ = await scene.plan()
    await scene.tell(turn_id, Step.SENDING, step)

    assert scene.freed == []
    assert scene.running == (0, 0, 0)


async def test_a_turn_that_is_not_sent_in_time_is_given_up_with_all_that_it_has(scene: Scene) -> None:
    turn_id, _ = await scene.plan()
    await scene.wait(SEND_S - 0.1)
    assert scene.running[0] == 1
    await scene.wait(0.1)

    assert scene.freed == [HANDED_OFF]
    assert scene.running == (0, 0, 0)
    with pytest.raises(FailedPreconditionError) as late:
        await scene.tell(turn_id, Step.SENDING)
    assert (late.value.reason, late.value.metadata["how"]) == ("TURN_OVER", "given_up")


async def test_a_turn_of_which_nothing_is_told_any_more_stops_counting_and_keeps_its_hand_off(scene: Scene) -> None:
    turn_id, _ = await scene.plan()
    await scene.tell(turn_id, Step.SENDING)
    await scene.wait(REPORT_S - 0.1)
    assert scene.running[0] == 1
    await scene.wait(0.1)

    assert scene.running == (0, 0, 0)
    assert scene.freed == [], "the engine may be reading it"


async def test_a_repeated_report_has_no_effect(scene: Scene) -> None:
    turn_id, forwarded = await scene.plan()
    await scene.tell(turn_id, Step.SENDING, Step.SENDING)
    for _ in range(5):
        await scene.planned.report(turn_id, "", Report(Step.FAILED, failure=Failure.FAULT, status=500))

    assert scene.state_of(forwarded) is BreakerState.CLOSED, "one failure is no series"


async def test_reports_of_other_routers_turns_and_of_no_turns_are_told_apart(scene: Scene) -> None:
    other = scene_of(Bench())
    turn_id, _ = await other.plan()
    with pytest.raises(FailedPreconditionError) as elsewhere:
        await scene.tell(turn_id, Step.SENDING)
    mine, _ = await scene.plan()
    with pytest.raises(BackhaulError) as unknown:
        await scene.tell(mine.partition(".")[0] + "." + "0" * 32, Step.SENDING)

    assert elsewhere.value.reason == "OTHER_ROUTER"
    assert unknown.value.reason == "TURN_UNKNOWN"
    for odd in ("", ".", mine + "0", mine.upper() + "é", "x" * 65):
        with pytest.raises(InvalidArgumentError):
            await scene.tell(odd, Step.SENDING)


async def test_an_engine_that_takes_no_connections_is_avoided_and_the_hand_off_freed(scene: Scene) -> None:
    turn_id, forwarded = await scene.plan()
    await scene.tell(turn_id, Step.SENDING)
    await scene.fail(turn_id, Failure.REFUSED)

    assert scene.freed == [HANDED_OFF], "nothing was sent"
    assert scene.state_of(forwarded) is BreakerState.OPEN


async def test_an_engine_that_fails_in_the_middle_is_avoided_in_the_end(scene: Scene) -> None:
    for _ in range(8):
        turn_id, _ = await scene.plan()
        await scene.tell(turn_id, Step.SENDING, Step.FIRST_BYTE)
        await scene.fail(turn_id, Failure.DISCONNECTED)

    assert scene.running == (0, 0, 0)
    assert any(scene.bench.live.breakers.avoided(node) for node in ready("d1", "d2"))


async def test_an_engines_refusal_of_the_request_is_no_failure(scene: Scene) -> None:
    for _ in range(8):
        turn_id, forwarded = await scene.plan()
        await scene.tell(turn_id, Step.SENDING)
        await scene.fail(turn_id, None, 400)

    assert scene.state_of(forwarded) is BreakerState.CLOSED


async def test_the_first_byte_teaches_how_long_it_takes(scene: Scene) -> None:
    turn_id, forwarded = await scene.plan()
    await scene.tell(turn_id, Step.SENDING)
    scene.bench.clock.now += 2.0
    await scene.tell(turn_id, Step.FIRST_BYTE, after_s=1_000.0)

    assert forwarded.served.ttft_s == pytest.approx(2.0, abs=0.1)


async def test_a_turn_without_a_prefill_engine_is_planned_for_decode_alone() -> None:
    _, forwarded = await scene_of(Bench(nodes=ready("d1"))).plan()

    assert forwarded.served.fallback
    assert b"remote_request_id" not in forwarded.leg.body


async def test_a_router_that_stops_frees_what_was_not_sent(scene: Scene) -> None:
    async with scene.planned:
        first, _ = await scene.plan()
        await scene.tell(first, Step.SENDING)
        await scene.plan()

    assert scene.freed == [HANDED_OFF]
    assert scene.running == (0, 0, 0)
