"""Types of attention.pyx. Addresses point to memory that the caller keeps alive."""

HAS_KERNEL: bool

def attend(
    q: int,
    keys: int,
    values: int,
    out: int,
    shape: tuple[int, int, int],
    num_kv_heads: int,
    place_bytes: int,
    places: int,
    first: int,
    begin: int,
    is_bf16: bool,
    window: int = 0,
) -> None: ...
