"""Configuration: flag > environment > TOML file > default, checked once, frozen."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from backhaul_common.toml import parse_toml


def _split(value: object) -> object:
    return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Several values: comma-separated in a flag or variable, an array in the file."""


class ServiceConfig(BaseSettings):
    """Base of a service's configuration.

    Subclasses name their variables with ``class Config(ServiceConfig, env_prefix="BACKHAUL_<SERVICE>_")`` and put a
    docstring under each field. Making one directly reads neither environment nor files; `load_config` does.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leaves the constructor's arguments as the only source."""
        return (init_settings,)


C = TypeVar("C", bound=ServiceConfig)

_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: twenty lines of usage would hide it."""

    def error(self, message: str) -> NoReturn:
        _exit(self.prog, [f"{message} (see {self.prog} --help)"])


def load_config(cls: type[C], *, prog: str, argv: Sequence[str] | None = None) -> C:
    """Reads a configuration from flags, environment and the file named by `--config`.

    Prints one line per error and exits with code 2 when anything is missing, unknown or of the wrong type.
    """
    flags = vars(_parser(cls, prog).parse_args(argv))
    path: str | None = flags.pop("config", None)
    try:
        file, environment = _from_file(path), _from_environment(cls)
        origins = {name: f"{path}: {name}" for name in file} | {name: _variable(cls, name) for name in environment}
        origins |= {name: _flag(name) for name in flags}
        return cls(**{**file, **environment, **flags})
    except ValidationError as error:
        _exit(prog, [_problem(cls, item, origins) for item in error.errors()])
    except OSError as error:
        _exit(prog, [f"--config {path} cannot be read: {error.strerror}"])
    except ValueError as error:
        _exit(prog, [str(error)])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(cls: type[ServiceConfig], name: str) -> str:
    return f"{cls.model_config.get('env_prefix', '')}{name.upper()}"


def _parser(cls: type[ServiceConfig], prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the settings below (names with underscores)")
    for name, field in cls.model_fields.items():
        facts = "; ".join([_default(field), *_bounds(field), _variable(cls, name)])
        text = f"{field.description or ''} [{facts}]".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(_flag(name), dest=name, metavar=_metavar(field), help=text)
    return parser


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(get_args(field.annotation)) + "}"
    return "VALUE,..." if get_origin(field.annotation) is tuple else "VALUE"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "computed"
    parts = field.default if isinstance(field.default, tuple) else (field.default,)
    # An empty secret is an empty text; any other shows as asterisks.
    return f"default {','.join('' if part is None else str(part) for part in parts) or 'none'}"


def _bounds(field: FieldInfo) -> list[str]:
    """Returns the numbers that a setting may have, in words: one entry, or none without bounds."""
    words = [
        f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"
        for name, word in _BOUNDS
        for item in field.metadata
        if (bound := getattr(item, name, None)) is not None
    ]
    return [", ".join(words)] if words else []


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_environment(cls: type[ServiceConfig]) -> dict[str, Any]:
    prefix = cls.model_config.get("env_prefix", "")
    known = {_variable(cls, name) for name in cls.model_fields}
    unknown = sorted(name for name in os.environ if prefix and name.startswith(prefix) and name not in known)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}")
    return EnvSettingsSource(cls)()


def _problem(cls: type[ServiceConfig], item: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Returns one error, beginning with the flag, variable or line of the file that the value came from."""
    # pydantic puts this before what a validator says.
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return (
            f"{_flag(name)} is required (or {_variable(cls, name)} in the environment, or {name} in the --config file)"
        )
    if item["type"] == "extra_forbidden":
        hint = "--help lists them; a --config file names them with underscores"
        return f"{origins.get(name, name)}: there is no such setting ({hint})"
    return f"{origins.get(name, _flag(name))}: {message}"


def _exit(prog: str, problems: Sequence[str]) -> NoReturn:
    sys.stderr.writelines(f"{prog}: {problem}\n" for problem in problems)
    raise SystemExit(2)
