"""Keeps the demo models: made once, and again when what they are made of changes."""

import hashlib
from pathlib import Path

from backhaul_local.processes import LocalError, ProcessSpec, Supervisor

_SOURCES = ("model.py", "corpus.txt", "chat_template.jinja")


def ensure_model(engine_python: Path, size: str, root: Path) -> Path:
    """Returns the folder of the model of that size (a key of `model.SIZES`), and makes it when it is not there.

    Raises LocalError with the end of the log when it cannot be made.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join((here / name).read_bytes() for name in _SOURCES)).hexdigest()[:12]
    directory = root / f"{size}-{digest}"
    if directory.exists():
        return directory
    command = [str(engine_python), str(here / "model.py"), str(directory), "--size", size]
    with Supervisor(root / "logs") as supervisor:
        process = supervisor.start(ProcessSpec(name=f"model-{size}", command=command))
        if process.wait() != 0:
            raise LocalError(f"the model could not be made; the end of {process.log}:\n{process.log_tail()}")
    return directory
