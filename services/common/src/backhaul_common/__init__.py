"""What Backhaul's services share: errors, etcd client, configuration, telemetry, TLS, clock."""
