"""Metrics that every service has."""

from backhaul_common.metering import Kind, Metric, one_of

IDENTITIES = ("services", "clients", "engines", "etcd")
"""What certificates are for."""

REFUSED_CALLS = Metric(
    name="backhaul.grpc.refused_calls",
    kind=Kind.COUNTER,
    unit="{call}",
    description="Calls over gRPC refused because too many were running",
    labels=(one_of("kind", ("calls", "streams", "checks", "watches")),),
)
TLS_REMAINING = Metric(
    name="backhaul.tls.remaining",
    kind=Kind.LEVEL,
    unit="s",
    description="Time until a certificate or its CA expires; negative when it has",
    labels=(one_of("name", IDENTITIES),),
)
