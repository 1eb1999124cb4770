# cython: language_level=3, boundscheck=False, wraparound=False
"""Attention on CPUs: rows of one sequence over its keys and values in place.

The caller keeps all addresses valid. The maths is in attention.h.
"""

from libc.stdint cimport int64_t, uint8_t, uintptr_t

cdef extern from "attention.h" nogil:
    ctypedef struct Attention:
        const uint8_t* q
        const uint8_t* keys
        const uint8_t* values
        const int64_t* places
        uint8_t* out
        int64_t first, place_bytes, num_rows, begin, num_heads, num_kv_heads, head_dim, window
        int is_bf16, has_failed
    int can_attend()
    int attend_c "attend"(Attention* a)

HAS_KERNEL = bool(can_attend())  # whether this machine has the instructions


def attend(
    uintptr_t q,
    uintptr_t keys,
    uintptr_t values,
    uintptr_t out,
    tuple shape not None,
    int64_t num_kv_heads,
    int64_t place_bytes,
    uintptr_t places,
    int64_t first,
    int64_t begin,
    bint is_bf16,
    int64_t window=0
) -> None:
    """q, out: contiguous [rows, heads, head_dim] = `shape`; keys, values: [places, num_kv_heads,
    head_dim], `place_bytes` from place to place. Row r sees begin + r + 1 keys: those at the
    int64 `places`, or, if that is 0, from place `first` on; of these the last `window`, unless that
    is 0. head_dim: a multiple of 32.
    """
    cdef Attention given
    cdef int is_done
    given.q, given.keys, given.values = <uint8_t*>q, <uint8_t*>keys, <uint8_t*>values
    given.out, given.places, given.first = <uint8_t*>out, <int64_t*>places, first
    given.num_rows, given.num_heads, given.head_dim = shape
    given.num_kv_heads, given.place_bytes, given.begin = num_kv_heads, place_bytes, begin
    given.is_bf16, given.has_failed, given.window = is_bf16, 0, window
    if not HAS_KERNEL or given.head_dim % 32 or begin < 0 or window < 0:
        raise ValueError(f"no attention for rows {shape} from {begin} on, or on this machine")
    with nogil:
        is_done = attend_c(&given)
    if not is_done:
        raise MemoryError(f"attention of rows {shape}: no memory for a block of them")
