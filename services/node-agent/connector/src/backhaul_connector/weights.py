"""Digests of weights: two engines exchange blocks only when theirs are equal.

vLLM's own compatibility hash holds the model's name, not its weights (``nixl/metadata.py``,
``compute_nixl_compatibility_hash``): two revisions under one name would exchange blocks without a word. Hashing every
byte of a large model takes minutes, so the digest samples: of every safetensors file its header (names, shapes, places)
and some bytes of each tensor; of any other weights file evenly spread samples.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLE_BYTES = 1024
_SAMPLES_PER_FILE = 256
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIGS = ("config.json", "adapter_config.json")


class WeightsUnknownError(Exception):
    """The weights cannot be digested; the message says why."""


def digest_folder(folder: Path, *, extra: str = "") -> str:
    """Returns the digest (hex, 32 characters) of the weights and configuration in a folder.

    ``extra`` holds what else changes the engine's numbers (quantization, overrides). Raises WeightsUnknownError when
    there are no weights files, OSError when one cannot be read.
    """
    files = next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise WeightsUnknownError(f"no weights files ({', '.join(_WEIGHTS)}) in {folder}")
    state = hashlib.blake2b(extra.encode(), digest_size=16)
    for name in _CONFIGS:
        if (path := folder / name).is_file():
            state.update(f"{name}:{path.stat().st_size}:".encode() + path.read_bytes())
    for path in files:
        state.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            for sample in _samples(file, path):
                state.update(sample)
    return state.hexdigest()


def _samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if path.suffix != ".safetensors":
        # The end as well: PyTorch's archives have their checksums there.
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES_PER_FILE):
            yield _at(file, last * index // (_SAMPLES_PER_FILE - 1))
        return
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size, _MAX_HEADER_BYTES):
        raise WeightsUnknownError(f"{path} is not a safetensors file")
    header = file.read(length)
    yield header
    for name, tensor in sorted(json.loads(header).items()):
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            for offset in {start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)}:
                yield _at(file, 8 + length + offset)


def _at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return offset.to_bytes(8, "big") + file.read(_SAMPLE_BYTES)


class WeightsDigests:
    """Computes digests on threads of its own, so that no caller ever waits for a disk.

    ``get`` answers None until a digest is known. A digest that cannot be computed stays None, and ``problem`` says why.
    """

    def __init__(self, digest: Callable[[str], str]) -> None:
        self._digest = digest
        self._lock = threading.Lock()
        self._started: set[str] = set()
        self._known: dict[str, str] = {}
        self._problems: dict[str, str] = {}

    def get(self, source: str, *, done: Callable[[], None] | None = None) -> str | None:
        """Returns the digest of ``source`` if it is known, and starts computing it otherwise.

        ``done`` is called on the computing thread once that attempt is over, whatever came of it.
        """
        with self._lock:
            if source in self._started:
                return self._known.get(source)
            self._started.add(source)
        threading.Thread(target=self._compute, args=(source, done), name="backhaul-weights", daemon=True).start()
        return None

    def problem(self, source: str) -> str:
        """Returns why the digest of ``source`` is not known, for people; empty when it is, or not yet."""
        return self._problems.get(source, "")

    def _compute(self, source: str, done: Callable[[], None] | None) -> None:
        try:
            self._known[source] = self._digest(source)
        except Exception as error:  # noqa: BLE001 - a thread's boundary; whatever went wrong, reuse stays off and says why
            self._problems[source] = f"{type(error).__name__}: {error}"
        if done is not None:
            done()
