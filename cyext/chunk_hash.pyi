"""Types of chunk_hash.pyx. Tokens: any C-contiguous buffer of int32, as an array or a memoryview.

NumPy's arrays are buffers to a type checker from Python 3.12 on only: hence `object`.
"""

HASH_BYTES: int
ROOT: bytes

def chain(tokens: object, key: bytes, parent: bytes, chunk_tokens: int) -> list[bytes]: ...
def span_key(tokens: object, key: bytes, parent: bytes) -> bytes: ...
def tenant_key(secret: bytes) -> bytes: ...
