# cython: language_level=3, boundscheck=False, wraparound=False
"""Routed experts on CPUs: scoring and choosing them, sorting rows by expert, and summing their results.

The caller keeps all addresses valid. The loops are in experts.h, the products in quantised.h.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t

cdef extern from "experts.h" nogil:
    ctypedef struct FloatProduct:
        const float* x
        const float* matrix
        float* out
        int64_t num_rows, num_outputs, width
    void multiply_all(FloatProduct* p)
    ctypedef struct Choosing:
        const float* scores
        const float* biases
        int64_t num_rows, num_experts, num_chosen
        int32_t* chosen
        float* weights
        float scale
        int is_normalised
    ctypedef struct WeightedSum:
        const uint8_t* results
        const uint8_t* base
        const int32_t* places
        const float* weights
        uint8_t* out
        int64_t num_rows, num_chosen, width
        int is_bf16
    void choose_all(Choosing* p)
    void sort_choices(
        const int32_t* chosen, int64_t num_rows, int64_t num_chosen, int64_t num_experts,
        int32_t* rows, int32_t* places, int32_t* bounds,
    )
    void add_all(WeightedSum* p)


def multiply(uintptr_t x, uintptr_t matrix, uintptr_t out, tuple sizes not None) -> None:
    """x @ matrix^T in float32, contiguous: [rows, width], [outputs, width], [rows, outputs]. `sizes`:
    rows, outputs, width. The bits of a row do not depend on the other rows of x.
    """
    cdef FloatProduct given
    given.x, given.matrix, given.out = <float*>x, <float*>matrix, <float*>out
    given.num_rows, given.num_outputs, given.width = sizes
    if given.num_rows < 1 or given.width < 1:
        raise ValueError(f"a product of {sizes}: rows and numbers are expected")
    with nogil:
        multiply_all(&given)


def choose(
    uintptr_t scores,
    uintptr_t biases,
    tuple sizes not None,
    bint is_normalised,
    float scale,
    uintptr_t weights,
    tuple places
) -> None:
    """Choose the experts of each row with the largest scores, the lower number of equal ones, and
    sort the choices by expert.

    scores: float32 [rows, experts]; biases: float32 [experts], added for the choice alone, 0 for
    none. `sizes`: rows, experts, and experts of a row. weights: float32 [rows, chosen]. `places`:
    of int32 [rows, chosen] the experts; [rows * chosen] the row of each place; [rows, chosen] the
    places; [experts + 1] where the places of each expert begin.
    """
    cdef Choosing given
    cdef int32_t* rows = <int32_t*><uintptr_t>places[1]
    cdef int32_t* at = <int32_t*><uintptr_t>places[2]
    cdef int32_t* bounds = <int32_t*><uintptr_t>places[3]
    given.scores, given.biases, given.weights = <float*>scores, <float*>biases, <float*>weights
    given.num_rows, given.num_experts, given.num_chosen = sizes
    given.chosen = <int32_t*><uintptr_t>places[0]
    given.is_normalised, given.scale = is_normalised, scale
    if not 0 < given.num_chosen <= given.num_experts:
        raise ValueError(f"{given.num_chosen} experts of {given.num_experts} cannot be chosen")
    with nogil:
        choose_all(&given)
        sort_choices(
            given.chosen, given.num_rows, given.num_chosen, given.num_experts, rows, at, bounds
        )


def add_weighted(
    uintptr_t results,
    uintptr_t base,
    uintptr_t places,
    uintptr_t weights,
    uintptr_t out,
    tuple sizes not None,
    bint is_bf16
) -> None:
    """base + the sum of a row's results by its weights, in the order of its choice, in float32,
    rounded once. results: [places, width]; base, out: [rows, width]; `sizes`: rows, experts of a
    row, width.
    """
    cdef WeightedSum given
    given.results, given.base, given.out = <uint8_t*>results, <uint8_t*>base, <uint8_t*>out
    given.places, given.weights = <int32_t*>places, <float*>weights
    given.num_rows, given.num_chosen, given.width = sizes
    given.is_bf16 = is_bf16
    with nogil:
        add_all(&given)
