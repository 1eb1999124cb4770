"""Whose request it is: what was computed for one tenant is never given to another.

Owns how an API key and a salt make a tenant's name. Knows nothing of headers or of what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from luceasync.errors import RequestError

MAX_SALT_CHARS = 256
# No HTTP header can hold it, so no key does: where the key ends is certain, whatever the salt is.
_SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the API key that let it in ("" where none is asked for), and whether its
    salts are trusted.
    """

    key: str = field(default="", repr=False)
    may_salt: bool = False

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
