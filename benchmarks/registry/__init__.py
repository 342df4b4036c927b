"""What lookups, publications and claims cost: registry and agents, beside bare gRPC handlers on the same etcd."""
