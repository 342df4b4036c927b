"""TLS on every hop of a stack: certificates in a folder of its own, and what each part is told of them."""

import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from backhaul_local.certificates import Authority, Pair, name_of


class StackTls:
    """Everybody shows a certificate of one CA and asks for one; services accept those whose role may call."""

    def __init__(self, folder: Path) -> None:
        """Makes the CA; certificates are made when they are asked for."""
        self.folder = folder
        self._authority = Authority(folder)
        self.ca = self._authority.path
        self.client = self._authority.issue("client")
        """What clients and probes show."""

    def replace(self) -> None:
        """Gives everybody a new certificate, under the same names."""
        for issued in sorted(self.folder.glob("*.pem")):
            if issued != self.ca:
                self._authority.issue(issued.stem)

    def etcd_flags(self) -> Sequence[str]:
        """Returns etcd's. Its members trust one another without."""
        pair = self._pair("etcd")
        return (
            *(f"--cert-file={pair.cert}", f"--key-file={pair.key}"),
            *("--client-cert-auth", f"--trusted-ca-file={self.ca}"),
        )

    def engine_flags(self) -> Sequence[str]:
        """Returns an engine's, as vLLM and the simulator have them."""
        pair = self._pair("engine")
        files = ("--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(pair.key), "--ssl-ca-certs", str(self.ca))
        return (*files, "--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED)))

    def registry_flags(self) -> Sequence[str]:
        """Returns a registry's."""
        pair = self._pair("registry")
        etcd = ("--etcd-ca", str(self.ca), "--etcd-cert", str(pair.cert), "--etcd-key", str(pair.key))
        return (*self._service("registry", "router", "operator"), "--tls-agents", name_of("agent"), *etcd)

    def agent_flags(self) -> Sequence[str]:
        """Returns an agent's."""
        return (*self._service("agent", "router", "operator"), "--tls-registry-name", name_of("registry"))

    def router_flags(self) -> Sequence[str]:
        """Returns a router's."""
        names = ("--tls-registry-name", name_of("registry"), "--tls-agent-name", name_of("agent"))
        return (*self._service("router", "gateway"), *names, "--client-ca", str(self.ca))

    def gateway_files(self) -> Pair:
        """Returns what a gateway shows."""
        return self._pair("gateway")

    def context(self) -> ssl.SSLContext:
        """Returns the context of a client."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.client.cert, self.client.key)
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the same for gRPC."""
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.client.key.read_bytes(), self.client.cert.read_bytes()
        )

    def _service(self, role: str, *callers: str) -> Sequence[str]:
        pair = self._pair(role)
        files = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-ca", str(self.ca))
        return (*files, "--tls-callers", ",".join(map(name_of, callers)))

    def _pair(self, role: str) -> Pair:
        pair = Pair(self.folder / f"{role}.pem", self.folder / f"{role}.key")
        return pair if pair.cert.exists() else self._authority.issue(role)
