"""What a benchmark counts as its own."""

import os
import signal
import subprocess
import sys
import time

from benchmarks.routing.machine import CpuMeter

_CHILD = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(60)"
_LEADER = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_CHILD!r}])"


def test_what_a_child_of_a_named_process_computes_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", _LEADER], stdout=subprocess.PIPE, process_group=0) as server:
        try:
            began, meter = time.monotonic(), CpuMeter([server.pid])
            assert server.stdout is not None
            server.stdout.readline()
            own_s = meter.shares()[0] * (os.cpu_count() or 1) * (time.monotonic() - began)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    assert own_s > 0.2
