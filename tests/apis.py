"""What there is to call: all services of all protos."""

import importlib
import pkgutil
from collections.abc import Iterator

from google.protobuf.descriptor import ServiceDescriptor

import backhaul


def services(package: str = "backhaul") -> Iterator[ServiceDescriptor]:
    """Yields the services of the modules whose name begins with ``package``."""
    for module in pkgutil.walk_packages(backhaul.__path__, "backhaul."):
        if module.name.startswith(f"{package}.") and module.name.endswith("_pb2"):
            yield from importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
