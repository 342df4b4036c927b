"""etcd's generated messages and stubs, as aetcd ships them (without types)."""

from typing import Any

import aetcd.rpc

rpc: Any = aetcd.rpc
