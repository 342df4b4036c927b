"""TLS contexts for HTTP: for connections that are made, and for those that are taken."""

import ssl

from backhaul_common.tls.files import Material, show
from backhaul_common.tls.identity import Identity

HANDSHAKE_S = 10.0
"""What a client gets to shake hands in, seconds."""


class CallerContext:
    """The context of an HTTP client. Ask for it with each request: connections of an older one are not used again."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._material = identity.material
        self._context = _caller(self._material)

    def current(self) -> ssl.SSLContext:
        """Returns the context of what is in force."""
        material = self._identity.material
        if material is not self._material:
            self._material, self._context = material, _caller(material)
        return self._context


class ListenerContext:
    """The context of an HTTP server, made once: it hands each handshake to that of what is in force."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._material = identity.material
        self._context = _listener(self._material)
        self.front = _listener(self._material)
        """For `create_server`."""
        # Called without a name as well (OpenSSL, ssl/statem/extensions.c, final_server_name). What the connection then
        # has is certificate and CAs of the other context; the rest stays the first one's.
        self.front.sni_callback = self._hand_over

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, front: ssl.SSLContext) -> None:
        material = self._identity.material
        if material is not self._material:
            self._material, self._context = material, _listener(material)
        connection.context = self._context


def _caller(material: Material) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=material.ca.decode("ascii") or None)
    show(context, material)
    return context


def _listener(material: Material) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    show(context, material)
    if material.ca:
        context.load_verify_locations(cadata=material.ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
        # Whoever takes a session up again is not asked for a certificate, though its CA be gone by now. In TLS 1.3
        # sessions are tickets; in 1.2 OpenSSL keeps them as well (SSL_SESS_CACHE_SERVER), and Python cannot forbid it.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context
