"""Configuration: flag > environment > TOML file > default, checked once, frozen."""

import argparse
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict


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


def load_config(cls: type[C], *, prog: str, argv: Sequence[str] | None = None) -> C:
    """Reads a configuration from flags, environment and the file named by `--config`.

    Prints one line per error and exits with code 2 when anything is missing, unknown or of the wrong type.
    """
    flags = vars(_parser(cls, prog).parse_args(argv))
    path: str | None = flags.pop("config", None)
    try:
        values = {**_from_file(path), **_from_environment(cls), **flags}
        return cls(**values)
    except ValidationError as error:
        _exit(prog, [_problem(cls, item["type"], item["loc"], item["msg"]) for item in error.errors()])
    except OSError as error:
        _exit(prog, [f"--config {path} cannot be read: {error.strerror}"])
    except ValueError as error:
        _exit(prog, [str(error)])


def _parser(cls: type[ServiceConfig], prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the settings below (names with underscores)")
    prefix = cls.model_config.get("env_prefix", "")
    for name, field in cls.model_fields.items():
        flag = "--" + name.replace("_", "-")
        text = f"{field.description or ''} [{_default(field)}; {prefix}{name.upper()}]".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            metavar = "{" + ",".join(choices) + "}" if choices else "VALUE"
            parser.add_argument(flag, dest=name, metavar=metavar, help=text)
    return parser


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "computed"
    if isinstance(field.default, tuple):
        return f"default {','.join(map(str, field.default)) or 'none'}"
    return f"default {'none' if field.default in (None, '') else field.default}"


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_environment(cls: type[ServiceConfig]) -> dict[str, Any]:
    prefix = cls.model_config.get("env_prefix", "")
    known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
    unknown = sorted(name for name in os.environ if prefix and name.startswith(prefix) and name not in known)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}")
    return EnvSettingsSource(cls)()


def _problem(cls: type[ServiceConfig], kind: str, location: tuple[int | str, ...], message: str) -> str:
    if not location:
        return message
    name = str(location[0])
    flag = f"--{name.replace('_', '-')}"
    if kind == "missing":
        prefix = cls.model_config.get("env_prefix", "")
        return f"{flag} is required (or {prefix}{name.upper()} in the environment, or {name} in the --config file)"
    if kind == "extra_forbidden":
        return f"{name}: there is no such setting (--help lists them; a --config file names them with underscores)"
    return f"{flag if name in cls.model_fields else name}: {message}"


def _exit(prog: str, problems: Sequence[str]) -> NoReturn:
    sys.stderr.writelines(f"{prog}: {problem}\n" for problem in problems)
    raise SystemExit(2)
