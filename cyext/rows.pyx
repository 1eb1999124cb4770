# cython: language_level=3, boundscheck=False, wraparound=False
"""Row operations between products on CPUs: RMS norms, and heads that are normed and rotated.

The caller keeps all addresses valid. The maths is in rows.h.
"""

from libc.stdint cimport int64_t, uint8_t, uintptr_t

cdef extern from "rows.h" nogil:
    enum: ROW_PART
    ctypedef struct Rows:
        const uint8_t* x
        const float* weight
        const float* key_weight
        const float* cos
        const float* sin
        uint8_t* out
        uint8_t* keys
        int64_t num_rows, stride, dim, num_heads, num_kv_heads, rotary_dim
        float eps
        int is_bf16
    void run_norm(Rows* p)
    void run_turn(Rows* p)

STEP = 16  # a row has a multiple of so many numbers
MAX_ROW = ROW_PART
MAX_HEAD = 1024


def rms_norm(
    uintptr_t x, uintptr_t weight, uintptr_t out, int64_t num_rows, int64_t dim, float eps, bint is_bf16
) -> None:
    """x / rms(x) * weight of contiguous rows [num_rows, dim], in float32, in x's dtype."""
    cdef Rows given
    given.x, given.weight, given.out = <uint8_t*>x, <float*>weight, <uint8_t*>out
    given.num_rows, given.stride, given.dim, given.eps = num_rows, dim, dim, eps
    given.is_bf16 = is_bf16
    if dim % STEP or not 0 < dim <= MAX_ROW:
        raise ValueError(f"rows of {dim} numbers; a multiple of {STEP} up to {MAX_ROW} is expected")
    with nogil:
        run_norm(&given)


def turn_heads(
    uintptr_t x,
    uintptr_t queries,
    uintptr_t keys,
    tuple sizes not None,
    tuple heads not None,
    tuple weights not None,
    float eps,
    uintptr_t cos,
    uintptr_t sin,
    bint is_bf16
) -> None:
    """Norm and rotate the query and key heads of rows into contiguous memory.

    `sizes`: rows, numbers of a row of x, of a head, and rotated numbers of a head. `heads`: query
    heads, which a row begins with, and key heads, which follow. `weights`: of their norms, float32;
    0 for none.
    cos, sin: float32 [rows, rotated / 2].
    """
    cdef Rows given
    given.x, given.out, given.keys = <uint8_t*>x, <uint8_t*>queries, <uint8_t*>keys
    given.num_rows, given.stride, given.dim, given.rotary_dim = sizes
    given.num_heads, given.num_kv_heads = heads
    given.weight = <float*><uintptr_t>weights[0]
    given.key_weight = <float*><uintptr_t>weights[1]
    given.cos, given.sin, given.eps, given.is_bf16 = <float*>cos, <float*>sin, eps, is_bf16
    if given.dim % STEP or not 0 < given.dim <= MAX_HEAD or given.rotary_dim > given.dim:
        raise ValueError(f"heads of {sizes[2:]} numbers; a multiple of {STEP} is expected")
    with nogil:
        run_turn(&given)
