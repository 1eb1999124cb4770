# cython: language_level=3, boundscheck=False, wraparound=False
"""Keyed, chained blake3 hashes of token ids: of full chunks, and of the span that a node adds.

Owns the layout of the hashed messages. Does not know trees, files or text.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy

from blake3 import blake3

HASH_BYTES = 32
ROOT = bytes(HASH_BYTES)  # the parent of a root

cdef Py_ssize_t PARENT_BYTES = HASH_BYTES
cdef Py_ssize_t SPAN_BYTES = 1 + HASH_BYTES + 8  # before the tokens: domain, parent, length

# First byte of a span's message. Its size is 1 mod 4 and a chunk's is 0 mod 4, so no message can be
# both, whatever the parent begins with.
cdef unsigned char SPAN_DOMAIN = 0x53

# The context of key derivation. Never change it: another string is another cache.
cdef str TENANT_CONTEXT = "luceasync 2026-11-21 tenant key of prefix snapshots"


cdef int hold_tokens(Py_buffer* view, object tokens) except -1:
    """Open `tokens` as contiguous int32s; ValueError for anything else."""
    try:
        PyObject_GetBuffer(tokens, view, PyBUF_ND | PyBUF_FORMAT)
    except (BufferError, TypeError, ValueError) as error:
        raise ValueError(
            f"tokens: expected a C-contiguous int32 buffer, got {type(tokens).__name__} ({error})"
        ) from error
    cdef str items = view.format.decode() if view.format != NULL else "B"
    cdef int ndim = view.ndim
    if ndim == 1 and view.itemsize == sizeof(int32_t) and items in ("i", "l", "=i", "@i"):
        return 0
    PyBuffer_Release(view)
    raise ValueError(
        f"tokens: expected one dimension of int32, got {ndim} with items of format {items!r}"
    )


cdef int check_bytes(str word, bytes value) except -1:
    if len(value) != HASH_BYTES:
        raise ValueError(f"{word}: expected {HASH_BYTES} bytes, got {len(value)}")
    return 0


cdef void put_tokens(
    unsigned char* out, const int32_t* tokens, Py_ssize_t num_tokens
) noexcept nogil:
    """Write tokens little-endian on any machine."""
    cdef Py_ssize_t i
    cdef uint32_t bits
    for i in range(num_tokens):
        bits = <uint32_t>tokens[i]
        out[4 * i] = bits & 255
        out[4 * i + 1] = (bits >> 8) & 255
        out[4 * i + 2] = (bits >> 16) & 255
        out[4 * i + 3] = bits >> 24


def chain(
    tokens, bytes key not None, bytes parent not None, chunk_tokens: int
) -> list[bytes]:
    """The hash of each full chunk: keyed blake3 of the previous hash and the chunk's tokens.

    `tokens` is a C-contiguous int32 buffer; `parent` (32 bytes, ROOT if there is none) is the
    hash before the first. So under one key, equal hashes mean equal tokens from the root on.
    Raises ValueError for other buffers, a key or parent of another size, an empty chunk.
    """
    cdef Py_buffer view
    cdef Py_ssize_t begin, size
    cdef list hashes = []
    cdef bytearray message
    check_bytes("key", key)
    check_bytes("parent", parent)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens}: expected 1 or more")
    hold_tokens(&view, tokens)
    try:
        if view.shape[0] < chunk_tokens:  # true for numbers beyond any C integer too
            return hashes
        size = chunk_tokens
        message = bytearray(PARENT_BYTES + 4 * size)
        out = <unsigned char*>(<char*>message)
        for begin in range(0, view.shape[0] - size + 1, size):
            memcpy(out, <const char*>parent, PARENT_BYTES)
            put_tokens(out + PARENT_BYTES, <const int32_t*>view.buf + begin, size)
            parent = blake3(message, key=key).digest()
            hashes.append(parent)
    finally:
        PyBuffer_Release(&view)
    return hashes


def span_key(tokens, bytes key not None, bytes parent not None) -> bytes:
    """The key of a node that adds `tokens`, one or more, to the node with the key `parent`.

    `tokens` is a C-contiguous int32 buffer. Never equals the hash of a chunk: the message
    is of another kind, and holds the number of tokens. Raises ValueError as `chain` does, and if
    there are no tokens.
    """
    cdef Py_buffer view
    cdef uint64_t num_tokens
    cdef bytearray message
    cdef int i
    check_bytes("key", key)
    check_bytes("parent", parent)
    hold_tokens(&view, tokens)
    try:
        num_tokens = view.shape[0]
        if num_tokens == 0:
            raise ValueError("tokens: expected one or more, got none")
        message = bytearray(SPAN_BYTES + 4 * view.shape[0])
        out = <unsigned char*>(<char*>message)
        out[0] = SPAN_DOMAIN
        memcpy(out + 1, <const char*>parent, PARENT_BYTES)
        for i in range(8):
            out[1 + PARENT_BYTES + i] = (num_tokens >> (8 * i)) & 255
        put_tokens(out + SPAN_BYTES, <const int32_t*>view.buf, view.shape[0])
    finally:
        PyBuffer_Release(&view)
    return blake3(message, key=key).digest()


def tenant_key(bytes secret not None) -> bytes:
    """The 32-byte hash key of the client with the API key `secret`; b"" is the shared tenant.

    blake3's key derivation: neither the key nor a hash reveals the secret.
    """
    return blake3(secret, derive_key_context=TENANT_CONTEXT).digest()
