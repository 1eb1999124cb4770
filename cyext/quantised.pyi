"""Types of quantised.pyx. Addresses point to contiguous memory that the caller keeps alive."""

REALS: tuple[str, ...]
BYTES: tuple[str, ...]
MINIMUMS: tuple[str, ...]
TILE: int
NAMES: tuple[str, ...]
KERNELS: tuple[str, ...]  # those that this machine can run, the best one last

class Matrix:
    def __init__(
        self,
        shape: tuple[int, int],
        groups: tuple[int, int],
        bits: int,
        kinds: tuple[str, str, str, str],
        numbers: list[float],
        has_table: bool,
        divides: bool,
        addresses: dict[str, int],
    ) -> None: ...
    def interleave(self) -> None: ...
    def multiply(
        self, x: int, num_rows: int, is_bf16: bool, out: int, residual: int, kernel: str
    ) -> None: ...
    def swiglu(self, x: int, num_rows: int, is_bf16: bool, out: int, kernel: str) -> None: ...
    def multiply_experts(
        self,
        x: int,
        rows: int,
        bounds: int,
        sizes: tuple[int, int],
        is_swiglu: bool,
        is_bf16: bool,
        out: int,
        kernel: str,
    ) -> None: ...
    def numbers(self, ids: int, num_ids: int, out: int) -> None: ...
