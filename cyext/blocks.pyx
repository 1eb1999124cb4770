# cython: language_level=3, boundscheck=False, wraparound=False
"""Moves the bits of a GGUF file's blocks to the tensors that luceasync.models.quant.packed lists, for
the types that most files have. luceasync.models.quant.ggml has all types, and is the reference.
"""

from libc.stdint cimport int64_t, uint8_t, uintptr_t

cdef extern from "blocks.h" nogil:
    enum: PLAIN, Q4_K, Q5_K, Q6_K
    ctypedef struct Unpacking:
        int kind, scale_bytes, has_minimum, plane_bytes, code_bytes
        int64_t num_rows, num_blocks
        const uint8_t* blocks
        uint8_t* codes
        uint8_t* planes
        uint8_t* scales
        uint8_t* small_scales
        uint8_t* minimums
        uint8_t* small_minimums
    void unpack_all(Unpacking* u)

# Bytes of a block and, of types that are stored as they are held, of its parts: D, whether it has M,
# high bits, codes.
SIZES = {
    "Q4_0": (18, (2, 0, 0, 16)),
    "Q4_1": (20, (2, 1, 0, 16)),
    "Q5_0": (22, (2, 0, 4, 16)),
    "Q5_1": (24, (2, 1, 4, 16)),
    "Q8_0": (34, (2, 0, 0, 32)),
    "IQ4_NL": (18, (2, 0, 0, 16)),
    "MXFP4": (17, (1, 0, 0, 16)),
    "Q4_K": (144, None),
    "Q5_K": (176, None),
    "Q6_K": (210, None),
}
KINDS = frozenset(SIZES)


def unpack(str kind not None, tuple shape not None, uintptr_t blocks, dict addresses not None) -> None:
    """Fill the tensors at `addresses`, by their names. shape: (rows, blocks of a row, bytes of a
    block). Raises ValueError for blocks of another kind.
    """
    cdef Unpacking u
    num_bytes, parts = SIZES[kind]
    u.num_rows, u.num_blocks, given_bytes = shape
    if given_bytes != num_bytes:
        raise ValueError(f"a block of {kind} has {num_bytes} bytes, not {given_bytes}")
    u.kind = PLAIN if parts else Q4_K if kind == "Q4_K" else Q5_K if kind == "Q5_K" else Q6_K
    u.scale_bytes, u.has_minimum, u.plane_bytes, u.code_bytes = parts or (0, 0, 0, 0)
    u.blocks = <const uint8_t*>blocks
    u.codes = <uint8_t*><uintptr_t>addresses["codes"]
    u.scales = <uint8_t*><uintptr_t>addresses["scales"]
    u.planes = <uint8_t*><uintptr_t>addresses.get("planes", 0)
    u.small_scales = <uint8_t*><uintptr_t>addresses.get("small_scales", 0)
    u.minimums = <uint8_t*><uintptr_t>addresses.get("minimums", 0)
    u.small_minimums = <uint8_t*><uintptr_t>addresses.get("small_minimums", 0)
    with nogil:
        unpack_all(&u)
