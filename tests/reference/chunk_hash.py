"""Chained hashes of token ids by struct: the slow truth of luceasync.cyext.chunk_hash."""

import struct

from blake3 import blake3


def packed(tokens: list[int]) -> bytes:
    """Four little-endian bytes a token."""
    return b"".join(struct.pack("<i", token) for token in tokens)


def chain(tokens: list[int], key: bytes, parent: bytes, chunk_tokens: int) -> list[bytes]:
    """The hash of each full chunk, of the one before it and its own tokens."""
    hashes = []
    while len(tokens) >= chunk_tokens:
        parent = blake3(parent + packed(tokens[:chunk_tokens]), key=key).digest()
        hashes.append(parent)
        tokens = tokens[chunk_tokens:]
    return hashes


def span_key(tokens: list[int], key: bytes, parent: bytes) -> bytes:
    """The key of a node that adds `tokens` to `parent`: S, parent, number of tokens, tokens."""
    message = b"S" + parent + struct.pack("<Q", len(tokens)) + packed(tokens)
    return blake3(message, key=key).digest()
