"""Finds where the product takes bytes apart, so that no parser is without a target."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor

ROOT = Path(__file__).parents[2]
_FOLDERS = ("services/*/src", "services/node-agent/connector/src", "clients/*/src", "deploy/replay/src")

_TAKE_APART = ("json.decode", "json.Decoder", "msgpack.decode", "msgpack.Decoder", "msgspec.convert")
_ALSO = (
    "json.loads",
    "tomllib.loads",
    "tomllib.load",
    "FromString",
    "ParseFromString",
    "pickle.loads",
    "yaml.safe_load",
)

ELSEWHERE = {
    "backhaul_common.call:_answers": "a tool for people; gRPC reads the answer",
    "backhaul_connector.weights:_samples": "files of the model, which its operator has chosen; a fault turns reuse off",
}
"""What needs no target of its own, and why."""


def sites() -> frozenset[str]:
    """Returns all places, as ``module:name`` of the function or of the value that is made for it."""
    return frozenset(site for folder in _FOLDERS for source in sorted(ROOT.glob(folder)) for site in _in_source(source))


def methods() -> frozenset[str]:
    """Returns the methods of all gRPC services, as ``rpc:service/method``."""
    return frozenset(
        f"rpc:{service.full_name}/{method.name}"
        for proto in sorted((ROOT / "proto").glob("backhaul/**/*.proto"))
        for service in _descriptor(proto).services_by_name.values()
        for method in service.methods
    )


def _descriptor(proto: Path) -> FileDescriptor:
    name = ".".join(proto.relative_to(ROOT / "proto").with_suffix("").parts)
    descriptor: FileDescriptor = importlib.import_module(f"{name}_pb2").DESCRIPTOR
    return descriptor


def _in_source(source: Path) -> Iterator[str]:
    for path in source.rglob("*.py"):
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        for name, node in _named(ast.parse(path.read_text()).body):
            if any(_takes_apart(inner) for inner in ast.walk(node)):
                yield f"{module}:{name}"


def _named(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield from _named(node.body, f"{within}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{within}{node.name}", node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{within}{name}", node
            case _:
                pass


def _takes_apart(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    written = ast.unparse(node)
    return written.endswith(_TAKE_APART) or written.endswith(_ALSO)
