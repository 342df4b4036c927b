"""A stack of simulated engines on a network that can be broken, under a steady load."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from backhaul_local.stack import Stack
from tests.soak.cluster import cluster_options
from tests.soak.network import BreakableNetwork
from tests.soak.recovery import Load, steady_load

SEED = 7
ROUTING = """
[breaker]
# Each fault alone: a node that is well again is not punished for what an earlier test made it do.
max_ejection_s = 4
"""


@pytest.fixture(scope="module")
def network() -> Iterator[BreakableNetwork]:
    with BreakableNetwork() as network:
        yield network


@pytest.fixture(scope="module")
def stack(network: BreakableNetwork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two of everything, three etcd members."""
    state = tmp_path_factory.mktemp("s")
    (state / "routing.toml").write_text(ROUTING)
    options = cluster_options(
        state,
        seed=SEED,
        routers=2,
        registries=2,
        # Without time to say so, a router that stops closes connections on which a client is just about to ask.
        router_flags=["--prefer", "warm", "--routing-file", str(state / "routing.toml"), "--lame-duck-s", "2"],
        network=network,
    )
    with Stack(options) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def turns(stack: Stack) -> AsyncIterator[Load]:
    """Turns that go on from test to test."""
    async with steady_load(stack, seed=SEED) as load:
        yield load


@pytest.fixture
def load(stack: Stack, turns: Load) -> Iterator[Load]:
    """The turns; afterwards no text may be wrong, no turn hung and no set read twice."""
    yield turns
    turns.ledgers.collect(node.url for node in stack.nodes)
    assert turns.tally.wrong == []
    assert turns.tally.outcomes["hung"] == 0
    assert turns.ledgers.forbidden() == {}
