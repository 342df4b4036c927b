"""Environment of the process: the side channel of rank 0. The engine sets it."""

VLLM_NIXL_SIDE_CHANNEL_HOST = "127.0.0.1"
VLLM_NIXL_SIDE_CHANNEL_PORT = 5600
