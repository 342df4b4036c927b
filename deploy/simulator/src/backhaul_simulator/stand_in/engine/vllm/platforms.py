"""The platform: a CPU, so that no host buffers are used."""


class _Platform:
    device_type = "cpu"


current_platform = _Platform()
