"""Whose request it is: what was computed for one tenant is never given to another, and clients have
equal shares.

Owns how a key and a salt make a tenant's name, and a key or an address a client's. Knows nothing of
headers or of what is kept.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from luceasync.errors import RequestError

MAX_SALT_CHARS = 256
# No HTTP header can hold it, so no key does: where the key ends is certain, whatever the salt is.
_SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the API key that let it in ("" where none is asked for), whether its
    salts are trusted, and the address of the connection, which nobody can invent as a header.
    """

    key: str = field(default="", repr=False)
    may_salt: bool = False
    address: str = ""

    @property
    def client(self) -> str:
        """Among whom lanes and places in the queue are shared: its key, else its address."""
        return self.key or network_of(self.address)

    def tenant(self, salt: str | None) -> str:
        """The tenant that `salt` narrows this caller to; without one, all that the key shares.

        Raises RequestError for a salt that is not trusted, or not 1 to MAX_SALT_CHARS long.
        """
        if salt is None:
            return self.key
        if not self.may_salt:
            raise RequestError(
                "Invalid value for 'cache_salt': this server takes none; "
                "it does when it is started with --trust-cache-salt.",
                param="cache_salt",
            )
        if not 1 <= len(salt) <= MAX_SALT_CHARS:
            raise RequestError(
                f"Invalid value for 'cache_salt': it has {len(salt)} characters; "
                f"expected 1 to {MAX_SALT_CHARS}.",
                param="cache_salt",
            )
        return self.key + _SEPARATOR + salt


def network_of(address: str) -> str:
    """What one host has for itself: an IPv4 address, or the first 64 bits of an IPv6 address, below
    which it may have any.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a socket that is no network's
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))
