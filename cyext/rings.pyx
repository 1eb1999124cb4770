# cython: language_level=3, boundscheck=False, wraparound=False
"""A ring of payloads in memory that two processes map: the end that writes and the end that reads.

Owns the numbers in that memory: the sequence before each payload, and how far the reader is. A value
in the memory is trusted only if it agrees with what a packet said.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

cdef extern from "stream_copy.h":
    void stream_copy(char* to, const char* source, size_t num_bytes) noexcept nogil

cdef extern from *:
    """
    #include <stdint.h>
    static uint64_t load_word(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static void store_word(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    static void settle_reads(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    """
    uint64_t load_word(const uint64_t* word) noexcept nogil
    void store_word(uint64_t* word, uint64_t value) noexcept nogil
    void settle_reads() noexcept nogil

ALIGN_BYTES = 256  # of payloads, for devices; each is preceded by as much, for its sequence
cdef Py_ssize_t ALIGN = ALIGN_BYTES
cdef Py_ssize_t LARGE = 256 << 10  # bytes from which on a copy bypasses the caches and releases the GIL

include "ring_places.pxi"


cdef class _Mapped:
    """A buffer that is held until close()."""

    cdef readonly object view
    cdef readonly bint is_closed
    cdef Py_buffer _buffer
    cdef char* _base
    cdef uint64_t* _read_word
    cdef Py_ssize_t _begin
    cdef Py_ssize_t _end
    cdef object _wrong

    def __cinit__(self, *args, **more):
        self.is_closed = True

    cdef int _map(self, view, begin, end, word, wrong) except -1:
        assert self.is_closed, "a ring is mapped once"
        PyObject_GetBuffer(view, &self._buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.is_closed = False
        if not (0 <= begin <= end <= self._buffer.len and 0 <= word <= self._buffer.len - 8):
            raise ValueError(f"a ring at [{begin}, {end}) of a memory of {self._buffer.len} bytes")
        if begin % 8 or word % 8:
            raise ValueError(f"a ring at {begin} whose word is at {word}: expected multiples of 8")
        self.view = view
        self._base = <char*>self._buffer.buf
        self._read_word = <uint64_t*>(self._base + <Py_ssize_t>word)
        self._begin, self._end = begin, end
        self._wrong = wrong
        return 0

    def __dealloc__(self):
        self._release()

    cdef void _release(self) noexcept:
        if not self.is_closed:
            self.is_closed = True
            PyBuffer_Release(&self._buffer)

    cdef uint64_t* _mark(self, Py_ssize_t begin) noexcept nogil:
        """The address of the sequence of the payload at `begin`."""
        return <uint64_t*>(self._base + begin - ALIGN)

    def close(self):
        """Release the memory. Idempotent."""
        self._release()
        self.view = None


include "ring_writer.pxi"
include "ring_reader.pxi"
