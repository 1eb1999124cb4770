# cython: language_level=3, boundscheck=False, wraparound=False
"""Products with quantised matrices on CPUs: codes are unpacked in registers, tile by tile of rows.

Owns the description of a matrix, not its memory, which the caller keeps valid and which has the
layout that docs/quantised.md draws. The products are in quantised.h.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uintptr_t
from libc.string cimport memcpy

cdef extern from "quantised.h" nogil:
    enum: NO_KERNEL, AVX2, AVX512, AVX512_BF16
    ctypedef struct Description "Matrix":
        int64_t num_rows, num_columns, group, supergroup, num_groups, num_supergroups
        int bits, scale, small, minimum, has_small_minimums, divides, codes_kind, has_table
        float zero
        uint8_t* codes
        uint8_t* planes
        uint8_t* scales
        uint8_t* small_scales
        uint8_t* minimums
        uint8_t* small_minimums
        float numbers[256]
        uint16_t halves[256]
    ctypedef struct Product:
        const Description* w
        const uint8_t* x
        const uint8_t* residual
        uint8_t* out
        const int32_t* rows
        int64_t num_rows
        int is_bf16, kernel, is_swiglu
    int best_kernel()
    int product(Product* p)
    int product_of_experts(Product* p, const int32_t* bounds, int64_t num_experts)
    int interleave_all(Description* w)
    void row_numbers(const Description* w, int64_t row, float* to)
    uint16_t to_bf16(float value)

REALS = ("fp16", "bf16", "fp32", "e8m0")
BYTES = ("", "uint8", "int8", "e4m3")
MINIMUMS = ("none", "own", "scale")
TILE = 16
NAMES = ("", "avx2", "avx512", "avx512_bf16")
KERNELS = NAMES[1 : best_kernel() + 1]  # those that this machine can run, the best one last


cdef class Matrix:
    """A quantised matrix; `interleave` brings its rows into tiles."""

    cdef Description matrix

    def __init__(
        self,
        shape: tuple[int, int],
        groups: tuple[int, int],
        int bits,
        kinds: tuple[str, str, str, str],
        numbers: list[float],
        bint has_table,
        bint divides,
        addresses: dict[str, int],
    ) -> None:
        """`groups`: columns of a group and of a super-group. `kinds`: the types of D, of s ("" for
        none), of minimums, and of 8-bit codes ("" for fewer bits). `numbers`: the value of each
        code.
        """
        cdef int i
        self.matrix.num_rows, self.matrix.num_columns = shape
        self.matrix.group, self.matrix.supergroup = groups
        self.matrix.num_groups = -(-self.matrix.num_columns // self.matrix.group)
        self.matrix.num_supergroups = -(-self.matrix.num_columns // self.matrix.supergroup)
        self.matrix.bits = bits
        self.matrix.scale = REALS.index(kinds[0])
        self.matrix.small = BYTES.index(kinds[1])
        self.matrix.minimum = MINIMUMS.index(kinds[2])
        self.matrix.codes_kind = BYTES.index(kinds[3])
        self.matrix.has_table, self.matrix.divides = has_table, divides
        self.matrix.zero = -numbers[0]
        for i in range(256):
            self.matrix.numbers[i] = numbers[i % len(numbers)]
            self.matrix.halves[i] = to_bf16(self.matrix.numbers[i])
        self.matrix.codes = <uint8_t*><uintptr_t>addresses["codes"]
        self.matrix.scales = <uint8_t*><uintptr_t>addresses["scales"]
        self.matrix.planes = <uint8_t*><uintptr_t>addresses.get("planes", 0)
        self.matrix.small_scales = <uint8_t*><uintptr_t>addresses.get("small_scales", 0)
        self.matrix.minimums = <uint8_t*><uintptr_t>addresses.get("minimums", 0)
        self.matrix.small_minimums = <uint8_t*><uintptr_t>addresses.get("small_minimums", 0)
        self.matrix.has_small_minimums = "small_minimums" in addresses

    def interleave(self) -> None:
        """Rearrange the stored rows as tiles, in place. Call it once."""
        cdef int is_done
        with nogil:
            is_done = interleave_all(&self.matrix)
        if not is_done:
            raise MemoryError("no memory to rearrange quantised rows as tiles")

    def multiply(
        self, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, uintptr_t residual,
        str kernel not None,
    ) -> None:
        """x @ matrix^T (+ residual). x: [num_rows, columns]; residual: [num_rows, rows], 0 for none."""
        cdef Product given
        given.residual, given.is_swiglu = <const uint8_t*>residual, False
        self._run(&given, x, num_rows, is_bf16, out, kernel)

    def swiglu(
        self, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, str kernel not None
    ) -> None:
        """silu(gate) * up, where gate is the first half of the product and up the second. Each half
        must be whole tiles.
        """
        cdef Product given
        given.residual, given.is_swiglu = NULL, True
        self._run(&given, x, num_rows, is_bf16, out, kernel)

    def multiply_experts(
        self, uintptr_t x, uintptr_t rows, uintptr_t bounds, tuple sizes not None, bint is_swiglu,
        bint is_bf16, uintptr_t out, str kernel not None,
    ) -> None:
        """The products of each expert's rows of x with its own part of the matrix: [experts] times
        equally many rows, a multiple of a tile; with `is_swiglu` first all gates, then all ups.

        rows: int32 [places], the row of x of each place; 0: x has a row for each place. bounds:
        int32 [experts + 1], where the places of each expert begin. `sizes`: places, experts.
        """
        cdef Product given
        cdef int64_t num_experts = sizes[1]
        given.residual, given.is_swiglu = NULL, is_swiglu
        given.rows = <const int32_t*>rows
        if self.matrix.num_rows % (num_experts * TILE * (2 if is_swiglu else 1)):
            raise ValueError(f"{self.matrix.num_rows} rows are not whole tiles of {num_experts} experts")
        self._begin(&given, x, sizes[0], is_bf16, out, kernel)
        cdef int is_done
        with nogil:
            is_done = product_of_experts(&given, <const int32_t*>bounds, num_experts)
        if not is_done:
            raise MemoryError(f"a product of {sizes[0]} rows: no memory to lay them out")

    cdef _run(self, Product* given, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, str kernel):
        cdef int is_done
        given.rows = NULL
        self._begin(given, x, num_rows, is_bf16, out, kernel)
        with nogil:
            is_done = product(given)
        if not is_done:
            raise MemoryError(f"a product of {num_rows} rows: no memory to lay them out")

    cdef _begin(self, Product* given, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, str kernel):
        given.w, given.x, given.out = &self.matrix, <const uint8_t*>x, <uint8_t*>out
        given.num_rows, given.is_bf16 = num_rows, is_bf16
        given.kernel = NAMES.index(kernel) if kernel in KERNELS else 0
        if not given.kernel:
            raise ValueError(f"no kernel {kernel!r} on this machine, which has {KERNELS}")
        if given.kernel == AVX512_BF16 and not is_bf16:
            given.kernel = AVX512

    def numbers(self, uintptr_t ids, int64_t num_ids, uintptr_t out) -> None:
        """Dequantise the rows of int64 ids to float32 [num_ids, columns]. Raises IndexError."""
        cdef int64_t* rows = <int64_t*>ids
        cdef int64_t i
        for i in range(num_ids):
            if not 0 <= rows[i] < self.matrix.num_rows:
                raise IndexError(f"row {rows[i]} of {self.matrix.num_rows}")
        with nogil:
            for i in range(num_ids):
                row_numbers(&self.matrix, rows[i], <float*>out + i * self.matrix.num_columns)
