"""The stand-in packages ``vllm`` and ``nixl``, each in a folder of its own that is put first on the import path.

Only processes of the simulator put them there; nothing here is imported as a module of this package.
"""

import sys
from pathlib import Path

ENGINE_ROOT = Path(__file__).parent / "engine"
"""Holds ``vllm``."""
NIXL_ROOT = Path(__file__).parent / "nixl"
"""Holds ``nixl``: for ``PYTHONPATH`` of a node agent beside a simulated engine."""


def use() -> None:
    """Puts both packages first on this process's import path. Call it before anything imports ``vllm`` or ``nixl``."""
    sys.path[:0] = [str(ENGINE_ROOT), str(NIXL_ROOT)]
