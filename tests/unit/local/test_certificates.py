"""Certificates for trying TLS."""

from pathlib import Path

from cryptography import x509

from backhaul_local.certificates import ROLES, Authority, name_of, uri_of, write_all
from backhaul_local.envoy import EnvoyAddresses, envoy_config


def names(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_there_is_one_for_each_service_that_has_its_name_and_its_hosts(tmp_path: Path) -> None:
    write_all(tmp_path, ["10.0.0.2", "decode.example"])
    assert {path.stem for path in tmp_path.glob("*.pem")} == {"ca", *ROLES}
    for role in ROLES:
        assert names(tmp_path / f"{role}.pem") == [name_of(role), uri_of(role), "10.0.0.2", "decode.example"]


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    write_all(tmp_path, [])
    keys = list(tmp_path.glob("*.key"))
    assert len(keys) == len(ROLES) + 1
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}


def test_a_second_time_certificates_are_new_and_the_ca_is_the_same(tmp_path: Path) -> None:
    write_all(tmp_path, [])
    ca, router = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "router.pem").read_bytes()
    write_all(tmp_path, [])
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert (tmp_path / "router.pem").read_bytes() != router
    again = x509.load_pem_x509_certificate((tmp_path / "router.pem").read_bytes())
    again.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))


def test_two_cas_have_two_names(tmp_path: Path) -> None:
    paths = [Authority(tmp_path / name).path for name in ("a", "b")]
    subjects = {x509.load_pem_x509_certificate(path.read_bytes()).subject for path in paths}
    assert len(subjects) == 2


def test_envoy_is_told_of_certificates_only_where_there_are_some(tmp_path: Path) -> None:
    one = ["127.0.0.1:1"]
    addresses = EnvoyAddresses(listen=one[0], admin=one[0], routers=one, pickers=one)
    plain, secure = envoy_config(addresses), envoy_config(addresses, tmp_path)
    assert all(line.lstrip().startswith("#TLS ") for line in plain.splitlines() if "transport_socket" in line)
    assert "#TLS" not in "".join(secure.splitlines()[6:])
    assert secure.count(f"{tmp_path}/gateway.key") == 1
    assert "/etc/backhaul" not in secure
