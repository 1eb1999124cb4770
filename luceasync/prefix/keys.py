"""Names of nodes: keyed hashes over the token ids from the root on, so that no tenant can hit, or
guess, what another has kept.
"""

from __future__ import annotations

from array import array

from luceasync.cyext.chunk_hash import ROOT, span_key
from luceasync.cyext.chunk_hash import tenant_key as _tenant_key
from luceasync.node_words import NodeKey

KEY_BYTES = 32


def tenant_key(name: str) -> bytes:
    """The 32-byte hash key of a tenant; that of "" is shared."""
    return _tenant_key(name.encode())


def node_key(tokens: array[int], tenant: bytes, parent: NodeKey | None) -> NodeKey:
    """The 32-byte key of the node that adds `tokens`, one or more int32, to the node `parent`
    (None: to nothing), for the tenant with the hash key `tenant`.
    """
    return NodeKey(span_key(tokens, tenant, parent or ROOT))
