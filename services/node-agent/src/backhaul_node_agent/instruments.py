"""The node agent's metrics, of all engines of its server together. No label is a set's, a session's or a request's."""

from backhaul_common.metering import SHORT_S, Kind, Metric, one_of
from backhaul_node_agent.core.life import State, Why
from backhaul_node_agent.core.tally import End

_P = "backhaul.agent."

GRANTED = "granted"

READY = Metric(name=_P + "ready", kind=Kind.LEVEL, unit="1", description="Whether the node may be given turns (1)")
LEASE = Metric(
    name=_P + "lease",
    kind=Kind.LEVEL,
    unit="1",
    description="Whether the node's lease is certainly valid (1): without it nothing is granted",
)
CONNECTORS = Metric(
    name=_P + "connectors",
    kind=Kind.LEVEL,
    unit="{engine}",
    description="Engines whose connector is connected and has replayed all",
)
CONNECTOR_DROPS = Metric(
    name=_P + "connector.drops",
    kind=Kind.COUNTER,
    unit="{message}",
    description="Messages that connectors dropped, as their queue was full or the agent away; a replay follows",
)

BLOCKS = Metric(name=_P + "blocks", kind=Kind.LEVEL, unit="{block}", description="Blocks that the engines have")
FREE_BLOCKS = Metric(
    name=_P + "blocks.free",
    kind=Kind.LEVEL,
    unit="{block}",
    description="Blocks that a request could have at once; not there where no engine says it, as with prefill engines",
)
RETAINED_BLOCKS = Metric(
    name=_P + "blocks.retained", kind=Kind.LEVEL, unit="{block}", description="Blocks that finished turns hold"
)
BUDGET_BLOCKS = Metric(
    name=_P + "blocks.budget", kind=Kind.LEVEL, unit="{block}", description="Blocks that finished turns may hold now"
)
BLOCK_SETS = Metric(
    name=_P + "block_sets",
    kind=Kind.LEVEL,
    unit="{set}",
    description="Block sets by where they are in their life",
    labels=(one_of("state", (state.name.lower() for state in State)),),
)
UNPUBLISHED = Metric(
    name=_P + "block_sets.unpublished",
    kind=Kind.LEVEL,
    unit="{set}",
    description="Block sets that turns cannot find yet, as their pointers are not durable",
)
PUBLISH_DURATION = Metric(
    name=_P + "publish.duration",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Time from the connector's report of a set until its pointers are durable",
    bounds=SHORT_S,
)
PUBLISH_BREAKS = Metric(
    name=_P + "publish.breaks",
    kind=Kind.COUNTER,
    unit="{break}",
    description="Streams of pointers to a registry that broke, or could not be opened",
)

CLAIMS = Metric(
    name=_P + "claims",
    kind=Kind.COUNTER,
    unit="{claim}",
    description="Claims of routers: granted, or why not",
    labels=(
        one_of(
            "result",
            (
                GRANTED,
                "set_unknown",
                "set_claimed",
                "set_fenced",
                "set_expiring",
                "draining",
                "lease_invalid",
                "weights_mismatch",
                "connector_away",
                "claim_returned",
                "request_id_reused",
            ),
        ),
    ),
)
RENEWALS = Metric(
    name=_P + "renewals",
    kind=Kind.COUNTER,
    unit="{set}",
    description="Block sets that an engine was asked to keep longer; it is asked again until it confirms",
)
CONFIRMED = Metric(
    name=_P + "deadlines.confirmed",
    kind=Kind.COUNTER,
    unit="{deadline}",
    description="Deadlines of sets that engines confirmed to have moved",
)
RELEASES = Metric(
    name=_P + "releases",
    kind=Kind.COUNTER,
    unit="{set}",
    description="Block sets whose release began, by reason",
    labels=(one_of("reason", (why.value for why in Why)),),
)
ENDS = Metric(
    name=_P + "block_sets.ended",
    kind=Kind.COUNTER,
    unit="{set}",
    description="Block sets that are gone, by how: read by a prefill engine, released, freed by the engine itself",
    labels=(one_of("how", (end.value for end in End)),),
)
LOST_NOTIFICATIONS = Metric(
    name=_P + "notifications.lost",
    kind=Kind.COUNTER,
    unit="{notification}",
    description="Releases and renewals that did not leave over NIXL; releases are sent again",
    labels=(one_of("reason", ("queue_full", "not_sent")),),
)
FOREIGN_LEASES = Metric(
    name=_P + "foreign_leases",
    kind=Kind.LEVEL,
    unit="{lease}",
    description="Leases of engines that are no block set of this agent's: hand-offs, second chances, others' requests",
)
