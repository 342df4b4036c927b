"""Backhaul's registry: node directory and block set index over etcd."""
