"""Random blocks of ggml types: any bits are valid as long as the scales are numbers."""

from __future__ import annotations

import numpy as np

from luceasync.gguf.header import TENSOR_TYPES

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
# Offsets of the fp16 scales in a block.
SCALES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def random_blocks(
    name: str, num_rows: int, num_columns: int, *, seed: int = 0, scale: float | None = None
) -> np.ndarray:
    """uint8 [rows, bytes of a row]. `scale`: about how large the scales are; None: any size."""
    kind, random = TYPES[name], np.random.default_rng(seed)
    blocks = num_columns // kind.block_items
    stored = random.integers(0, 256, (num_rows, blocks, kind.block_bytes), dtype=np.uint8)
    for at in SCALES_AT[name]:
        if scale is None:
            bits = random.integers(0, 0x7C00, (num_rows, blocks), dtype=np.uint16)
            signed = bits | random.integers(0, 2, bits.shape, dtype=np.uint16) << 15
            scales = signed.view(np.float16)
        else:
            scales = (scale * random.uniform(0.5, 1.5, (num_rows, blocks))).astype(np.float16)
        stored[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        exponents = random.integers(0, 250, (num_rows, blocks), dtype=np.uint8)
        stored[..., 0] = exponents if scale is None else np.uint8(128 + np.log2(scale))
    return stored.reshape(num_rows, -1)
