"""Ctrl-C in the first seconds, while Python still imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "backhaul_local", "up", "--simulated"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, said, errors) == (130, "interrupted\n", "")
