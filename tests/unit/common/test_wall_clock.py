"""Machines' clocks may be seconds apart: nothing that is decided may rest on the time of day."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLOCK = "services/common/src/backhaul_common/clock.py"
"""The one module that reads it, as `time_of_day`."""
ASKING = {
    "services/common/src/backhaul_common/call.py": "certificates' validity is given in times of day",
    "services/common/src/backhaul_common/tls/identity.py": "certificates' validity is given in times of day",
    "services/node-agent/src/backhaul_node_agent/diagnosis_service.py": "people are told, who compare the machines'",
    "services/registry/src/backhaul_registry/diagnosis_service.py": "people are told, who compare the machines'",
}
"""The modules that may ask for it, and why."""
SOURCES = sorted((ROOT / "services").rglob("src/**/*.py"))
WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


def wall_clocks(source: str) -> list[str]:
    """Returns what in a module reads the time of day: calls, and functions that are called by their bare name."""
    tree = list(ast.walk(ast.parse(source)))
    bare = [
        ast.unparse(node)
        for node in tree
        if isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and {name.name for name in node.names} & WALL_CLOCKS
    ]
    return bare + [
        ast.unparse(node)
        for node in tree
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WALL_CLOCKS
        and ast.unparse(node.func.value).split(".")[-1] in ("time", "datetime", "date")
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_service_reads_the_time_of_day(path: Path) -> None:
    assert wall_clocks(path.read_text()) == (["datetime.now(UTC)"] if path == ROOT / CLOCK else [])


def test_it_is_asked_for_only_where_nothing_is_decided_between_machines() -> None:
    asking = {str(path.relative_to(ROOT)) for path in SOURCES if "time_of_day" in path.read_text()}
    assert asking - {CLOCK} == ASKING.keys()


def test_a_module_that_reads_it_is_found() -> None:
    source = "import time, datetime\ntime.time()\ndatetime.datetime.now()\ntime.monotonic()\nclock.now()\n"
    assert wall_clocks(source) == ["time.time()", "datetime.datetime.now()"]
    assert wall_clocks("from time import monotonic, time\n") == ["from time import monotonic, time"]
    assert wall_clocks("from time import monotonic\n") == []
