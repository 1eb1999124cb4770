"""Types of chunk_hash.pyx. Tokens are any C-contiguous buffer of int32.

They are typed `object`: to type checkers, NumPy arrays are buffers only from Python 3.12 on.
"""

HASH_BYTES: int
ROOT: bytes

def chain(tokens: object, key: bytes, parent: bytes, chunk_tokens: int) -> list[bytes]: ...
def span_key(tokens: object, key: bytes, parent: bytes) -> bytes: ...
def tenant_key(secret: bytes) -> bytes: ...
