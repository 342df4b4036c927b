"""Settings that belong together."""

import pytest
from pydantic import ValidationError

from backhaul_common.tls import TlsFiles, TlsSettings
from backhaul_node_agent.config import Config as AgentConfig
from backhaul_registry.config import Config as RegistryConfig
from backhaul_router.config import Config as RouterConfig

TLS = {"tls_cert": "c.pem", "tls_key": "k.pem", "tls_ca": "ca.pem"}


def router(**settings: object) -> RouterConfig:
    return RouterConfig.model_validate({"registry": ("a:1",), **settings})


def test_without_files_there_is_no_tls() -> None:
    config = router()
    assert (config.tls_files, config.client_files, config.engine_files) == (None, None, None)
    assert (RegistryConfig().tls_files, AgentConfig().tls_files, AgentConfig().engine_files) == (None, None, None)


def test_one_certificate_is_shown_on_every_hop_and_peers_are_trusted_by_whom_they_are() -> None:
    config = router(**TLS, client_ca="clients.pem", engine_ca="engines.pem")
    cas = [files.ca for files in (config.tls_files, config.client_files, config.engine_files) if files]
    assert cas == ["ca.pem", "clients.pem", "engines.pem"]
    shown = {(f.cert, f.key) for f in (config.tls_files, config.client_files, config.engine_files) if f}
    assert shown == {("c.pem", "k.pem")}


def test_engines_are_trusted_by_the_services_ca_and_clients_need_no_certificate_unless_told() -> None:
    config = router(**TLS)
    assert config.engine_files == TlsFiles(cert="c.pem", key="k.pem", ca="ca.pem")
    assert config.client_files == TlsFiles(cert="c.pem", key="k.pem")


def test_a_ca_of_engines_is_enough_to_check_them() -> None:
    assert AgentConfig(engine_ca="engines.pem").engine_files == TlsFiles(ca="engines.pem")


@pytest.mark.parametrize("missing", TLS)
@pytest.mark.parametrize("config", [RouterConfig, RegistryConfig, AgentConfig])
def test_certificate_key_and_ca_go_together(config: type[TlsSettings], missing: str) -> None:
    settings: dict[str, object] = {"registry": ("a:1",)} if config is not RegistryConfig else {}
    settings |= {name: path for name, path in TLS.items() if name != missing}
    with pytest.raises(ValidationError, match="tls_cert, tls_key and tls_ca go together"):
        config.model_validate(settings)


@pytest.mark.parametrize("name", ["tls_callers", "tls_agent_name", "tls_registry_name", "client_ca"])
def test_what_means_nothing_without_tls_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} needs tls_cert, tls_key and tls_ca"):
        router(**{name: "x"})


def test_names_of_agents_mean_nothing_without_tls() -> None:
    with pytest.raises(ValidationError, match="tls_agents needs"):
        RegistryConfig(tls_agents=("agent.backhaul",))
