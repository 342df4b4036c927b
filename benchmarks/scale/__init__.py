"""What a turn costs routers, registries, agents and etcd, from one engine pair to a hundred engines."""
