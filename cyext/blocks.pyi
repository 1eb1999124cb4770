"""Types of blocks.pyx. Addresses point to contiguous memory that the caller keeps alive."""

KINDS: frozenset[str]

def unpack(
    kind: str, shape: tuple[int, int, int], blocks: int, addresses: dict[str, int]
) -> None: ...
