"""Events of logs are fixed texts: what changes from line to line is in fields."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[1] / "services"
SOURCES = sorted(SERVICES.rglob("src/**/*.py"))
LEVELS = {"debug", "info", "warning", "error"}


def logged(path: Path) -> Iterator[tuple[ast.Attribute, ast.Call | None]]:
    """Yields what is taken of a file's loggers, and the call if it is called right there."""
    tree = ast.parse(path.read_text())
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("_log", "structlog.get_logger(__name__)"):
            yield node, calls.get(id(node))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SERVICES)))
def test_every_event_is_a_constant(path: Path) -> None:
    for taken, call in logged(path):
        where = f"{path.name}:{taken.lineno}"
        assert taken.attr in LEVELS | {"log"}, f"{where}: {taken.attr}"
        assert call is not None, f"{where}: a logger's method that is called elsewhere hides what is logged"
        event = call.args[1] if taken.attr == "log" else call.args[0]
        assert isinstance(event, ast.Constant), f"{where}: {ast.unparse(event)}"
        assert isinstance(event.value, str), f"{where}: {ast.unparse(event)}"


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if "backhaul_connector" not in path.parts], ids=lambda path: path.name
)
def test_what_changes_is_in_fields(path: Path) -> None:
    # The connector logs by vLLM's means, which have no fields.
    for taken, call in logged(path):
        assert call is not None
        assert len(call.args) == (2 if taken.attr == "log" else 1), f"{path.name}:{taken.lineno}"
        assert "%" not in ast.unparse(call.args[-1]), f"{path.name}:{taken.lineno}"


def test_there_are_events() -> None:
    assert sum(1 for path in SOURCES for _ in logged(path)) > 100
