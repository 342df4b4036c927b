"""The cache salt that keeps tenants apart inside the engines' own prefix caches."""

import hashlib
import hmac


def salt_for(cluster_key: bytes, *, tenant: str, client_salt: str) -> str:
    """Returns the salt (64 hex digits) that engines get for a tenant and the client's own salt (empty for none).

    Length-prefixed, so that no two pairs give the same bytes. Hex, because vLLM allows 128 characters without ``@/\\``
    (`entrypoints/generate/base/protocol.py`).
    """
    mac = hmac.new(cluster_key, digestmod=hashlib.sha256)
    for part in (tenant.encode(), client_salt.encode("utf-8", "surrogatepass")):
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.hexdigest()
