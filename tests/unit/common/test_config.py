from typing import Any

import pytest
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from backhaul_common.config import ServiceConfig, Texts, load_config


class Config(ServiceConfig, env_prefix="BACKHAUL_SAMPLE_"):
    listen: str = "127.0.0.1:1"
    """Address to listen on."""
    endpoints: Texts
    """Peers, host:port."""
    ttl_s: float = Field(default=10.0, ge=1.0, le=3600.0)
    """Lease."""
    tls: bool = False
    """Whether to encrypt."""
    password: SecretStr = SecretStr("")
    """Secret."""

    @field_validator("listen")
    @classmethod
    def _never(cls, value: str) -> str:
        if value == "never":
            raise ValueError("must not be never")
        return value

    @model_validator(mode="after")
    def _encrypted(self) -> "Config":
        if self.password.get_secret_value() and not self.tls:
            raise ValueError("a password needs tls")
        return self


def load(*argv: str) -> Config:
    return load_config(Config, prog="sample", argv=["--endpoints", "a:1", *argv])


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN", "ENDPOINTS", "TTL_S"):
        monkeypatch.delenv(f"BACKHAUL_SAMPLE_{name}", raising=False)


def test_flags_win_over_environment_over_file_over_default(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/sample.toml"
    with open(path, "w") as file:
        file.write('listen = "file:1"\nttl_s = 3\ntls = true\n')
    monkeypatch.setenv("BACKHAUL_SAMPLE_LISTEN", "env:1")
    monkeypatch.setenv("BACKHAUL_SAMPLE_TTL_S", "4")
    config = load("--config", path, "--listen", "flag:1")
    assert (config.listen, config.ttl_s, config.tls, config.password) == ("flag:1", 4.0, True, SecretStr(""))


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1 , b:2,"])
def test_several_values_are_comma_separated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SAMPLE_ENDPOINTS", text)
    assert load_config(Config, prog="sample", argv=[]).endpoints == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        pytest.param(
            ["--endpoints", "a:1", "--nope", "1"],
            "sample: unrecognized arguments: --nope 1 (see sample --help)",
            id="unknown flag",
        ),
        pytest.param(["--endpoints"], "--endpoints: expected one argument (see sample --help)", id="no value"),
        pytest.param(["--endpoints", "a:1", "--ttl-s", "0.5"], "--ttl-s: Input should be greater than", id="bound"),
        pytest.param(
            ["--endpoints", "a:1", "--listen", "never"], "sample: --listen: must not be never", id="validator"
        ),
        pytest.param(["--endpoints", "a:1", "--password", "x"], "sample: a password needs tls", id="of several"),
        pytest.param(
            ["--endpoints", "a:1", "--ttl-s", "soon"],
            "--ttl-s: Input should be a valid number",
            id="type",
        ),
        pytest.param(
            [],
            "--endpoints is required (or BACKHAUL_SAMPLE_ENDPOINTS in the environment, or endpoints in the --config",
            id="missing",
        ),
        pytest.param(["--endpoints", "a:1", "--config", "/nonexistent"], "/nonexistent", id="no file"),
        pytest.param(["--endpoints", "a:1", "--lis", "x"], "--lis", id="abbreviation"),
    ],
)
def test_a_wrong_flag_ends_the_process_with_code_2_and_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(Config, prog="sample", argv=argv)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sample: ")
    assert complaint in line


def test_a_wrong_value_is_named_by_where_it_came_from(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{tmp_path}/sample.toml"
    with open(path, "w") as file:
        file.write('ttl_s = "soon"\ntls = 7\nlisten = 1\n')
    monkeypatch.setenv("BACKHAUL_SAMPLE_TTL_S", "later")
    with pytest.raises(SystemExit):
        load("--config", path, "--listen", "never")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": Input")[0].split(": must")[0] for line in lines] == [
        "sample: --listen",
        "sample: BACKHAUL_SAMPLE_TTL_S",
        f"sample: {path}: tls",
    ]


def test_an_unknown_environment_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BACKHAUL_SAMPLE_LISTNE", "x")
    with pytest.raises(SystemExit):
        load()
    assert "BACKHAUL_SAMPLE_LISTNE" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "complaint"), [("nope = 1", "nope: there is no such setting"), ("=", "Invalid")])
def test_a_wrong_file_is_refused(
    text: str, complaint: str, tmp_path: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{tmp_path}/sample.toml"
    with open(path, "w") as file:
        file.write(text)
    with pytest.raises(SystemExit):
        load("--config", path)
    assert complaint in capsys.readouterr().err


def test_secrets_are_masked_and_never_echoed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in repr(load("--tls", "--password", "hunter2"))
    wrong: dict[str, Any] = {"password": ["hunter2"]}
    with pytest.raises(ValidationError) as caught:
        Config(endpoints=("a:1",), **wrong)
    assert "hunter2" not in str(caught.value)


def test_settings_are_logged_whole_with_secrets_masked() -> None:
    logged = load("--tls", "--password", "hunter2").model_dump(mode="json")
    assert logged == {
        "listen": "127.0.0.1:1",
        "endpoints": ["a:1"],
        "ttl_s": 10.0,
        "tls": True,
        "password": "**********",
    }


def test_help_shows_docstring_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "Address to listen on. [default 127.0.0.1:1; BACKHAUL_SAMPLE_LISTEN]" in out
    assert "--no-tls" in out
    assert "--endpoints VALUE,... Peers, host:port. [required; BACKHAUL_SAMPLE_ENDPOINTS]" in out
    assert "Lease. [default 10.0; at least 1, at most 3600; BACKHAUL_SAMPLE_TTL_S]" in out
    assert "Secret. [default none; BACKHAUL_SAMPLE_PASSWORD]" in out


def test_a_configuration_is_frozen_and_made_of_its_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SAMPLE_LISTEN", "env:1")
    config = Config(endpoints=("a:1",))
    assert config.listen == "127.0.0.1:1"
    with pytest.raises(ValidationError):
        config.listen = "x"
