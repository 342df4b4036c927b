"""What a tenant's turns are kept apart by: the cache salt inside engines, and the scope of lookups."""

from backhaul_router.core.lookup import scope_of
from backhaul_router.core.salt import salt_for
from backhaul_router.core.tenants import Callers


class Scopes:
    """Salts and scopes of all tenants."""

    def __init__(self, tenants: Callers, cluster_key: bytes) -> None:
        """``cluster_key`` is used when tenants are configured."""
        self._tenants = tenants
        self._cluster_key = cluster_key

    def salt(self, tenant: str, client_salt: str) -> str:
        """Returns the cache salt of a tenant's turn; the client's own where there are no tenants."""
        if not self._tenants.configured:
            return client_salt
        return salt_for(self._cluster_key, tenant=tenant, client_salt=client_salt)

    def scope(self, tenant: str, *, model: str, client_salt: str) -> str:
        """Returns the scope in which a tenant's turns with a model are found."""
        return scope_of(model=model, cache_salt=self.salt(tenant, client_salt), tenant=tenant)
