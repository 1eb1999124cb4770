"""Types of rows.pyx. Addresses point to memory that the caller keeps alive."""

STEP: int
MAX_ROW: int
MAX_HEAD: int

def rms_norm(
    x: int, weight: int, out: int, num_rows: int, dim: int, eps: float, is_bf16: bool
) -> None: ...
def turn_heads(
    x: int,
    queries: int,
    keys: int,
    sizes: tuple[int, int, int, int],
    heads: tuple[int, int],
    weights: tuple[int, int],
    eps: float,
    cos: int,
    sin: int,
    is_bf16: bool,
) -> None: ...
