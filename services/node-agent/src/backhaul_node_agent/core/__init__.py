"""Pure core: no I/O, no clock, no gRPC."""
