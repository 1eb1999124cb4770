"""Types of experts.pyx. Addresses point to memory that the caller keeps alive."""

def multiply(x: int, matrix: int, out: int, sizes: tuple[int, int, int]) -> None: ...
def choose(
    scores: int,
    biases: int,
    sizes: tuple[int, int, int],
    is_normalised: bool,
    scale: float,
    weights: int,
    places: tuple[int, int, int, int],
) -> None: ...
def add_weighted(
    results: int,
    base: int,
    places: int,
    weights: int,
    out: int,
    sizes: tuple[int, int, int],
    is_bf16: bool,
) -> None: ...
