"""A thin etcd v3 client on grpc.aio: transactions, leases, and listings that stay up to date."""

from backhaul_common.etcd.client import (
    EtcdClient,
    EtcdOptions,
    Lease,
    Listing,
    MemberStatus,
    TxnResult,
    WatchBatch,
)
from backhaul_common.etcd.listwatch import Following, Outage, Update, follow
from backhaul_common.etcd.ops import Absent, Compare, Delete, Get, KeyValue, LeaseIs, Op, Put, Unchanged, prefix_end

__all__ = [
    "Absent",
    "Compare",
    "Delete",
    "EtcdClient",
    "EtcdOptions",
    "Following",
    "Get",
    "KeyValue",
    "Lease",
    "LeaseIs",
    "Listing",
    "MemberStatus",
    "Op",
    "Outage",
    "Put",
    "TxnResult",
    "Unchanged",
    "Update",
    "WatchBatch",
    "follow",
    "prefix_end",
]
