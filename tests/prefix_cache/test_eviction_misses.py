"""What found no room is known by where it went on, and how it began."""

from __future__ import annotations

from array import array

from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import NodeKey
from luceasync.prefix_cache.index import EvictionMisses

TENANT, OTHER = b"t" * 32, b"o" * 32
NODE = NodeKey(b"n" * 32)
TOKENS = array("i", range(3 * CHUNK_TOKENS))


def test_who_goes_on_alike_is_told():
    misses = EvictionMisses()
    misses.add((TENANT, NODE), TOKENS)
    assert misses.matches((TENANT, NODE), TOKENS[: CHUNK_TOKENS + 1])
    assert not misses.matches((TENANT, NODE), TOKENS[1:])
    assert not misses.matches((TENANT, NODE), TOKENS[: CHUNK_TOKENS - 1])
    assert not misses.matches((TENANT, None), TOKENS)
    assert not misses.matches((OTHER, NODE), TOKENS)


def test_only_the_newest_places_are_known():
    misses = EvictionMisses(max_entries=2)
    for tenant in (TENANT, OTHER, TENANT, b"x" * 32):
        misses.add((tenant, None), TOKENS)
    assert len(misses) == 2
    assert misses.matches((TENANT, None), TOKENS)
    assert not misses.matches((OTHER, None), TOKENS)
