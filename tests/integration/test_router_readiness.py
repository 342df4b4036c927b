"""What a router's log says of its readiness."""

from structlog.testing import capture_logs

from tests.fakes.engine import FakeEngine
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import router_stack


async def test_the_log_has_each_reason_why_a_router_is_not_ready_and_its_end_once() -> None:
    with capture_logs() as logs:

        def said() -> list[tuple[bool, str | None]]:
            return [(line["ready"], line["reason"]) for line in logs if line["event"] == "readiness changed"]

        async with router_stack(listed=False) as stack:
            await eventually(lambda: len(said()) == 1)
            await stack.add(FakeEngine("prefill"), compatibility_hash="one")
            await eventually(lambda: len(said()) == 2)
            await stack.add(FakeEngine("prefill"), compatibility_hash="one")
            await stack.add(FakeEngine("decode"), compatibility_hash="another")
            await eventually(lambda: len(said()) == 3)
            await stack.add(FakeEngine("decode"), compatibility_hash="one")
            await eventually(lambda: len(said()) == 4)
        assert said() == [
            (False, "no nodes are known"),
            (False, "no decode node is ready"),
            (False, "no prefill node can exchange blocks with a decode node of the same model"),
            (True, None),
        ]
