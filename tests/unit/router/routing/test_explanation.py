"""Why a turn went the way it did."""

import pytest

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.explanation import Explanation, ProfileExplanation, RouteExplanation
from backhaul_router.core.turn import Route
from tests.unit.router.routing.targets import demand

WARM = RouteExplanation(Route.WARM, reason="nothing is held")


def test_the_route_without_a_reason_against_it_was_taken() -> None:
    cold = RouteExplanation(Route.COLD)
    assert Explanation(demand(), (WARM, cold)).taken is cold
    assert Explanation(demand(), (WARM,)).taken is None


@pytest.mark.parametrize(("drained_by", "busy"), [("max-waiting", True), ("model", False), ("", False)])
def test_a_turn_without_a_route_may_have_met_busy_engines_only(drained_by: str, busy: bool) -> None:
    leg = ProfileExplanation(leg=Leg.DECODE, drained_by=drained_by)
    cold = RouteExplanation(Route.COLD, (ProfileExplanation(leg=Leg.PREFILL), leg), reason="no engine is left")
    assert Explanation(demand(), (WARM, cold)).busy is busy
