# cython: language_level=3, boundscheck=False, wraparound=False
"""Tensors in one aligned buffer: offsets, copies, checksums, and views of the result.

Owns offsets and bounds. Knows bytes only, not dtypes, meanings of names or files.
"""

from cpython.buffer cimport (
    PyBUF_READ,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.string cimport memset

from sys import maxsize

from xxhash import xxh3_128

# A group is copied, then hashed while still in the cache. Larger groups take the GIL back less often,
# which is what costs time while another thread runs Python.
cdef Py_ssize_t GROUP_BYTES = 8 << 20

cdef extern from "stream_copy.h":
    void stream_copy(char* to, const char* source, size_t num_bytes) noexcept nogil


cdef int hold(Py_buffer* view, object buffer, int flags, str word) except -1:
    """Open `buffer` as contiguous bytes; ValueError if it is not."""
    try:
        return PyObject_GetBuffer(buffer, view, flags)
    except (BufferError, TypeError, ValueError) as error:
        wanted = "a writable, C-contiguous" if flags & PyBUF_WRITABLE else "a C-contiguous"
        raise ValueError(
            f"{word}: expected {wanted} buffer, got {type(buffer).__name__} ({error})"
        ) from error


cdef class Transfer:
    """Open buffers with checked places in a target, so that copying cannot fail."""

    cdef Py_ssize_t num_sources
    cdef Py_buffer* sources  # the last one is the target
    cdef Py_buffer* target
    cdef Py_ssize_t* begins

    def __cinit__(self, object target, list offsets, list sources):
        cdef Py_ssize_t i
        if len(offsets) != len(sources):
            raise ValueError(f"{len(sources)} sources for {len(offsets)} offsets: expected as many")
        self.num_sources = len(sources)
        self.sources = <Py_buffer*>PyMem_Calloc(self.num_sources + 1, sizeof(Py_buffer))
        self.begins = <Py_ssize_t*>PyMem_Calloc(self.num_sources + 1, sizeof(Py_ssize_t))
        if self.sources == NULL or self.begins == NULL:
            raise MemoryError
        self.target = self.sources + self.num_sources
        hold(self.target, target, PyBUF_WRITABLE, "target")
        for i in range(self.num_sources):
            hold(self.sources + i, sources[i], PyBUF_SIMPLE, f"source {i}")
            self.place(i, offsets[i])

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.sources != NULL:
            for i in range(self.num_sources + 1):
                PyBuffer_Release(self.sources + i)  # a no-op for one that was not opened
        PyMem_Free(self.sources)
        PyMem_Free(self.begins)

    cdef int place(self, Py_ssize_t i, object offset) except -1:
        """Set where source i begins; the earlier ones are placed."""
        cdef Py_buffer* source = self.sources + i
        cdef char* begin = <char*>self.target.buf
        if not 0 <= offset <= self.target.len - source.len:
            raise ValueError(
                f"source {i}: bytes [{offset}, {offset + source.len}) are not inside the target "
                f"of {self.target.len}"
            )
        self.begins[i] = offset
        if i > 0 and self.begins[i] < self.end(i - 1):
            raise ValueError(
                f"source {i}: begins at {offset}, before the end of the one before it at "
                f"{self.end(i - 1)}; expected rising places without overlap"
            )
        if begin < <char*>source.buf + source.len and <char*>source.buf < begin + self.target.len:
            raise ValueError(f"source {i}: shares memory with the target, expected memory apart")
        return 0

    cdef Py_ssize_t end(self, Py_ssize_t i) noexcept nogil:
        return self.begins[i] + self.sources[i].len

    cdef void copy(self, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
        """Copy sources [begin, end), and zero the padding before each but the very first."""
        cdef char* target = <char*>self.target.buf
        cdef Py_ssize_t i
        for i in range(begin, end):
            if i > 0:
                memset(target + self.end(i - 1), 0, self.begins[i] - self.end(i - 1))
            stream_copy(target + self.begins[i], <char*>self.sources[i].buf, self.sources[i].len)

    cdef Py_ssize_t end_of_group(self, Py_ssize_t begin) noexcept nogil:
        """The end of the group that starts at source `begin`; a large source is a group of its own."""
        cdef Py_ssize_t num_bytes = 0
        cdef Py_ssize_t end = begin
        while end < self.num_sources and self.sources[end].len <= GROUP_BYTES - num_bytes:
            num_bytes += self.sources[end].len
            end += 1
        return max(end, begin + 1)


cdef str checksum(Py_buffer* view):
    hasher = xxh3_128()
    hasher.update(PyMemoryView_FromMemory(<char*>view.buf, view.len, PyBUF_READ))
    return hasher.hexdigest()


def layout(list specs not None, alignment: int) -> tuple[list[int], int]:
    """The offset of each (name, bytes), in this order, and the size of the whole.

    Each begins at the next multiple of `alignment`, a power of two; the end is not padded.
    Raises ValueError for a duplicate name, and for sizes that no buffer can have.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment}: expected a power of two")
    cdef list offsets = []
    cdef set names = set()
    end = 0
    for name, num_bytes in specs:
        begin = (end + alignment - 1) // alignment * alignment
        end = begin + num_bytes
        if name in names:
            raise ValueError(f"tensor {name!r}: is there twice")
        if num_bytes < 0 or end > maxsize:
            raise ValueError(
                f"tensor {name!r}: {num_bytes} bytes from {begin}, expected 0 or more and an end "
                f"at {maxsize} or before"
            )
        names.add(name)
        offsets.append(begin)
    return offsets, end


def fill(target, list offsets not None, list sources not None) -> None:
    """Copy each source, any C-contiguous buffer, to its offset in `target`, without the GIL.

    Padding between two sources becomes zero; bytes before the first and after the last stay.
    Raises ValueError, with nothing written, where a buffer is not contiguous (or the target not
    writable), a source would leave the target, overlap the one before it or lie in the target.
    """
    cdef Transfer transfer = Transfer(target, offsets, sources)
    with nogil:
        transfer.copy(0, transfer.num_sources)


def fill_with_checksums(target, list offsets not None, list sources not None) -> list[str]:
    """As `fill`; return the xxh3_128 of each source in hex, computed while it is still in the cache.

    The sources must not change meanwhile.
    """
    cdef Transfer transfer = Transfer(target, offsets, sources)
    cdef Py_ssize_t begin = 0
    cdef Py_ssize_t end, i
    cdef list digests = []
    while begin < transfer.num_sources:
        end = transfer.end_of_group(begin)
        with nogil:
            transfer.copy(begin, end)
        for i in range(begin, end):
            digests.append(checksum(transfer.sources + i))
        begin = end
    return digests


def checksums(list buffers not None) -> list[str]:
    """The xxh3_128 of each C-contiguous buffer's bytes, in hex. Raises ValueError for others."""
    cdef Py_buffer view
    cdef list digests = []
    for i, buffer in enumerate(buffers):
        hold(&view, buffer, PyBUF_SIMPLE, f"buffer {i}")
        try:
            digests.append(checksum(&view))
        finally:
            PyBuffer_Release(&view)
    return digests


def views(buffer, list table not None) -> dict[str, memoryview]:
    """For each (name, offset, bytes), a view of those bytes of `buffer`; nothing is copied.

    A view can be written where `buffer` can. Raises ValueError where `buffer` is not contiguous
    bytes, an entry is not inside it, or a name is there twice.
    """
    cdef dict found = {}
    whole = memoryview(buffer)
    if whole.ndim != 1 or whole.itemsize != 1 or not whole.c_contiguous:
        raise ValueError(
            f"buffer: expected contiguous bytes, got {type(buffer).__name__} of "
            f"{whole.ndim} dimensions with items of {whole.itemsize} bytes"
        )
    for name, offset, num_bytes in table:
        if offset < 0 or num_bytes < 0 or offset + num_bytes > whole.nbytes:
            raise ValueError(
                f"tensor {name!r}: {num_bytes} bytes from {offset} are not inside the buffer "
                f"of {whole.nbytes}"
            )
        if name in found:
            raise ValueError(f"tensor {name!r}: is there twice")
        found[name] = whole[offset : offset + num_bytes]
    return found
