# cython: language_level=3, boundscheck=False, wraparound=False
"""Products with quantised matrices on CPUs: codes are unpacked in registers, row tile by row tile.

Owns a matrix's description, not its memory: addresses are the caller's, who keeps them valid and
gives what docs/quantised.md draws. The products are in grouped.h.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uintptr_t
from libc.string cimport memcpy

cdef extern from "grouped.h" nogil:
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
        int64_t num_rows
        int is_bf16, kernel, is_swiglu
    int best_kernel()
    int product(Product* p)
    int interleave(Description* w, int64_t begin, int64_t end)
    void row_numbers(const Description* w, int64_t row, float* to)
    uint16_t to_bf16(float value)

REALS = ("fp16", "bf16", "fp32", "e8m0")
BYTES = ("", "uint8", "int8", "e4m3")
MINIMUMS = ("none", "own", "scale")
TILE = 16
NAMES = ("", "avx2", "avx512", "avx512_bf16")
KERNELS = NAMES[1 : best_kernel() + 1]  # of this machine's instructions, the best ones last


cdef class Matrix:
    """Rows of quantised numbers, which `interleave` has put in tiles."""

    cdef Description form

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
        """`groups`: columns of a group and of a super-group. `kinds`: of D, of s ("" for none), of
        minimums, and of codes of 8 bits ("" for fewer). `numbers`: what codes stand for.
        """
        cdef int i
        self.form.num_rows, self.form.num_columns = shape
        self.form.group, self.form.supergroup = groups
        self.form.num_groups = -(-self.form.num_columns // self.form.group)
        self.form.num_supergroups = -(-self.form.num_columns // self.form.supergroup)
        self.form.bits = bits
        self.form.scale = REALS.index(kinds[0])
        self.form.small = BYTES.index(kinds[1])
        self.form.minimum = MINIMUMS.index(kinds[2])
        self.form.codes_kind = BYTES.index(kinds[3])
        self.form.has_table, self.form.divides = has_table, divides
        self.form.zero = -numbers[0]
        for i in range(256):
            self.form.numbers[i] = numbers[i % len(numbers)]
            self.form.halves[i] = to_bf16(self.form.numbers[i])
        self.form.codes = <uint8_t*><uintptr_t>addresses["codes"]
        self.form.scales = <uint8_t*><uintptr_t>addresses["scales"]
        self.form.planes = <uint8_t*><uintptr_t>addresses.get("planes", 0)
        self.form.small_scales = <uint8_t*><uintptr_t>addresses.get("small_scales", 0)
        self.form.minimums = <uint8_t*><uintptr_t>addresses.get("minimums", 0)
        self.form.small_minimums = <uint8_t*><uintptr_t>addresses.get("small_minimums", 0)
        self.form.has_small_minimums = "small_minimums" in addresses

    def interleave(self) -> None:
        """Rows as they are stored become tiles, in place; once."""
        cdef int is_done
        with nogil:
            is_done = interleave(&self.form, 0, self.form.num_rows)
        if not is_done:
            raise MemoryError("quantised rows: no memory for a tile of 16")

    def multiply(
        self, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, uintptr_t residual,
        str kernel not None,
    ) -> None:
        """x [num_rows, columns] with the matrix, and residual [num_rows, rows] (0: none) to it."""
        cdef Product given
        given.residual, given.is_swiglu = <const uint8_t*>residual, False
        self._run(&given, x, num_rows, is_bf16, out, kernel)

    def swiglu(
        self, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, str kernel not None
    ) -> None:
        """silu(gate) * up, where gate is the first half of the product and up the second; halves
        are whole tiles.
        """
        cdef Product given
        given.residual, given.is_swiglu = NULL, True
        self._run(&given, x, num_rows, is_bf16, out, kernel)

    cdef _run(self, Product* given, uintptr_t x, int64_t num_rows, bint is_bf16, uintptr_t out, str kernel):
        cdef int is_done
        given.w, given.x, given.out = &self.form, <const uint8_t*>x, <uint8_t*>out
        given.num_rows, given.is_bf16 = num_rows, is_bf16
        given.kernel = NAMES.index(kernel) if kernel in KERNELS else 0
        if not given.kernel:
            raise ValueError(f"no kernel {kernel!r} on this machine, which has {KERNELS}")
        if given.kernel == AVX512_BF16 and not is_bf16:
            given.kernel = AVX512
        with nogil:
            is_done = product(given)
        if not is_done:
            raise MemoryError(f"a product of {num_rows} rows: no memory to lay them out")

    def numbers(self, uintptr_t ids, int64_t num_ids, uintptr_t out) -> None:
        """float32 [num_ids, columns] of these rows, int64; IndexError where there is no such."""
        cdef int64_t* rows = <int64_t*>ids
        cdef int64_t i
        for i in range(num_ids):
            if not 0 <= rows[i] < self.form.num_rows:
                raise IndexError(f"row {rows[i]} of {self.form.num_rows}")
        with nogil:
            for i in range(num_ids):
                row_numbers(&self.form, rows[i], <float*>out + i * self.form.num_columns)
