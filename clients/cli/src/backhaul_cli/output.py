"""What commands print: tables for people, JSON for programs."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Returns the console of standard output; wide enough for tables where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def as_document(message: Message) -> dict[str, Any]:
    """Returns a message as JSON has it, all fields there, named as in the proto."""
    document: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


def print_json(document: object) -> None:
    """Prints one JSON document in one piece."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def print_json_line(document: object) -> None:
    """Prints one JSON document in one line, for commands that go on."""
    click.echo(json.dumps(document, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table; columns whose name ends with ``#`` hold numbers. What services say is never taken for markup."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.removesuffix("#"), justify="right" if column.endswith("#") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(plain(str(cell))) for cell in row))
    return made


def plain(text: str) -> str:
    """Returns what others said in one line that does nothing to a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, in the singular or with an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """Returns a time in words that fit a column."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
