"""Which JSON Web Tokens are taken, and whom they name."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Protocol

import msgspec

MAX_LEEWAY_S = 300

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """The table ``[jwt]`` of a tenants file."""

    issuer: _Text
    """Who must have issued a token (``iss``)."""
    audience: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]
    """Whom it must be for (``aud``): one of these."""
    keys_file: _Text
    """File with the issuer's public keys (a JSON Web Key Set); relative to the tenants file's folder."""
    tenant_claim: _Text = "sub"
    """Claim that names the tenant."""
    leeway_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEEWAY_S)] = 30
    """How far the issuer's clock may be from this machine's, seconds."""


class Tokens(Protocol):
    """Reads tokens."""

    def name_in(self, token: str) -> str:
        """Returns whom a token names; empty when it is not valid here. Raises ApiError (401) for one that was."""
        ...


def token_settings(value: Any) -> TokenSettings:
    """Returns the settings in a table. Raises ValueError naming what is wrong."""
    if not isinstance(value, dict):
        raise ValueError("jwt must be a table [jwt]")
    known = [field.name for field in fields(TokenSettings)]
    for key in value:
        if key not in known:
            raise ValueError(f"jwt: {key!r} is unknown; there are {', '.join(known)}")
    try:
        return msgspec.convert(value, TokenSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"jwt: {error}") from error
