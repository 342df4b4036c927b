"""The stack that a soak runs against: simulated engines with clocks of their own, several of everything."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from backhaul_local.options import DirectNetwork, Network, StackOptions
from backhaul_local.simulated import SimulatedEngine

CLAIM_TTL_S = 7.0
"""The shortest that agents take: what a claim blocks is free again soon."""
LEASE_TTL_S = 3.0
TTL_S = 20.0
ETCD_USER, ETCD_PASSWORD = "backhaul", "secret"
ETCD_QUOTA_BYTES = 24 * 1024 * 1024
"""Room for a random run, and soon filled."""
_TOKEN_TTL_S = 3


def cluster_options(
    state: Path,
    *,
    seed: int,
    routers: int = 8,
    registries: int = 3,
    etcd_members: int = 3,
    prefill: int = 2,
    decode: int = 2,
    block_count: int = 30_000,
    warm_prefill_s: float = 5.0,
    max_retention_s: float = TTL_S,
    router_flags: Sequence[str] = (),
    network: Network | None = None,
    etcd_quota_bytes: int = 0,
) -> StackOptions:
    """Returns what the stack consists of. Engines' clocks are hours apart and drift, as the seed has it.

    ``max_retention_s``: how long finished turns are kept at most, however often they are renewed.
    ``router_flags``: what routers are told besides.
    ``etcd_quota_bytes``: size at which etcd takes no more; 0: its own (2 GB).
    """
    rng = Random(f"clocks-{seed}")
    return StackOptions(
        state=state,
        etcd_members=etcd_members,
        # Members of one machine share its disk: what a power cut would cost is not what a soak is about.
        etcd_flags=[
            *("--unsafe-no-fsync", "--heartbeat-interval", "100", "--election-timeout", "1000"),
            *("--auth-token-ttl", str(_TOKEN_TTL_S), "--bcrypt-cost", "4"),
            *("--quota-backend-bytes", str(etcd_quota_bytes)),
            # What fills it would stay in memory for 100,000 entries.
            *("--snapshot-count", "1000"),
        ],
        registries=registries,
        # No obstacle as long as nobody switches authentication on.
        registry_flags=["--etcd-user", ETCD_USER, "--etcd-password", ETCD_PASSWORD],
        routers=routers,
        prefill=[_engine(rng, block_count) for _ in range(prefill)],
        decode=[_engine(rng, block_count) for _ in range(decode)],
        agent_flags=[
            *("--claim-ttl-s", str(CLAIM_TTL_S), "--lease-ttl-s", str(LEASE_TTL_S)),
            *("--margin-s", "0.5", "--lease-margin-s", "0.5", "--max-retention-s", str(max_retention_s)),
        ],
        # More processes than cores: a lookup waits for one now and then.
        router_flags=["--lookup-budget-s", "1", "--warm-prefill-timeout-s", str(warm_prefill_s), *router_flags],
        network=network or DirectNetwork(),
    )


def _engine(rng: Random, block_count: int) -> SimulatedEngine:
    clock = {"--clock-offset-s": rng.uniform(-40_000, 40_000), "--clock-rate-ppm": rng.uniform(-200, 200)}
    flags = [part for name, value in clock.items() for part in f"{name}={value:.3f}".split()]
    # Whatever can be read is read: what a prefill engine lacks is seldom more than a few blocks here.
    reading = ["--recompute-threshold", "1", "--min-verified", "16"]
    return SimulatedEngine(
        ttl_s=TTL_S, flags=[*flags, *reading, "--block-size", "16", "--block-count", str(block_count)]
    )
