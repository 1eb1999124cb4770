# cython: language_level=3, boundscheck=False, wraparound=False
"""A ring of payloads in memory that two processes map: the end that writes it, and the one that reads.

Owns the numbers that stand in the memory: before each payload its sequence, and how far all have
been read. What is there is believed only where it agrees with what this end was told.
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

ALIGN_BYTES = 256  # of payloads, for devices; as much stands before each one, for its sequence
cdef Py_ssize_t ALIGN = ALIGN_BYTES
cdef Py_ssize_t LARGE = 256 << 10  # copied past the caches, while other threads run

cdef struct Place:
    uint64_t sequence
    Py_ssize_t begin
    Py_ssize_t end
    bint is_done


cdef class Places:
    """Places in the order in which they were given or came; a queue that grows."""

    cdef Place* places
    cdef Py_ssize_t first
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity

    def __cinit__(self):
        self.capacity = 64
        self.places = <Place*>PyMem_Malloc(self.capacity * sizeof(Place))
        if self.places == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.places)

    cdef Place* at(self, Py_ssize_t index) noexcept:
        return self.places + (self.first + index) % self.capacity

    cdef int push(self, uint64_t sequence, Py_ssize_t begin, Py_ssize_t end) except -1:
        cdef Place* grown
        cdef Place* place
        cdef Py_ssize_t i
        if self.count == self.capacity:
            grown = <Place*>PyMem_Malloc(2 * self.capacity * sizeof(Place))
            if grown == NULL:
                raise MemoryError
            for i in range(self.count):
                grown[i] = self.at(i)[0]
            PyMem_Free(self.places)
            self.places, self.first, self.capacity = grown, 0, 2 * self.capacity
        place = self.at(self.count)
        place.sequence, place.begin, place.end, place.is_done = sequence, begin, end, False
        self.count += 1
        return 0

    cdef void pop(self) noexcept:
        self.first = (self.first + 1) % self.capacity
        self.count -= 1


cdef class _Mapped:
    """Memory that is held open until close()."""

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
        assert self.is_closed, "a ring is made once"
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
        """Where the sequence of the payload at `begin` stands."""
        return <uint64_t*>(self._base + begin - ALIGN)

    def close(self):
        """Let the memory go. Idempotent."""
        self._release()
        self.view = None


cdef class Room:
    """Bytes `[begin, begin + num_bytes)` of the memory, for a payload of this number."""

    cdef readonly Py_ssize_t begin
    cdef readonly Py_ssize_t num_bytes
    cdef readonly object sequence
    cdef readonly object view


cdef class RingWriter(_Mapped):
    """Gives out places at the ring's head; those that were read come free at its tail.

    `wrong` is raised, with words, for what the other end may not have written.
    """

    cdef Places _in_use
    cdef Py_ssize_t _head
    cdef uint64_t _num_read
    cdef uint64_t _next

    def __init__(self, view, begin, end, word, first_sequence, wrong):
        self._map(view, begin, end, word, wrong)
        self._in_use = Places()
        self._head = self._begin
        self._next = first_sequence
        self._num_read = first_sequence - 1
        store_word(self._read_word, self._num_read)

    cpdef Room reserve(self, Py_ssize_t num_bytes):
        """Room for a payload, or None until others have been read.

        Raises ValueError for one that never fits.
        """
        cdef uint64_t read
        cdef Py_ssize_t taken, begin
        cdef Room room
        if self.is_closed:
            raise ValueError("a ring that was closed")
        read = load_word(self._read_word)
        if read != self._num_read:
            self._free_until(read)
        if num_bytes < 0 or num_bytes > self._end - self._begin - ALIGN:
            self._refuse(num_bytes)
        taken = ALIGN + (num_bytes + ALIGN - 1) // ALIGN * ALIGN
        if taken > self._end - self._begin:
            self._refuse(num_bytes)
        begin = self._find(taken)
        if begin < 0:
            return None
        self._head = begin + taken
        self._in_use.push(self._next, begin, self._head)
        room = Room.__new__(Room)
        room.begin, room.num_bytes, room.sequence = begin + ALIGN, num_bytes, self._next
        room.view = self.view[room.begin : room.begin + num_bytes]
        self._next += 1
        store_word(self._mark(room.begin), 0)  # who still reads what lay here sees that
        return room

    cpdef commit(self, room):
        """The room, as a packet tells of it: its bytes are final, its number stands before them."""
        cdef Room own = <Room?>room  # TypeError for room of another channel
        if self.is_closed:
            raise ValueError("a ring that was closed")
        store_word(self._mark(own.begin), own.sequence)
        return own

    cpdef bint push(self):
        """What is committed lies where it is read: nothing is left to send."""
        return True

    cdef Py_ssize_t _find(self, Py_ssize_t taken) noexcept:
        cdef Py_ssize_t tail
        if not self._in_use.count:
            return self._begin  # the same bytes: caches hold them
        tail = self._in_use.at(0).begin
        if self._head > tail:
            if self._head + taken <= self._end:
                return self._head
            return self._begin if self._begin + taken <= tail else -1
        return self._head if self._head + taken <= tail else -1

    cdef int _free_until(self, uint64_t read) except -1:
        if not self._num_read < read < self._next:
            raise self._wrong(f"it says that it has read payload {read}, which was not sent")
        self._num_read = read
        while self._in_use.count and self._in_use.at(0).sequence <= read:
            self._in_use.pop()
        return 0

    cdef int _refuse(self, Py_ssize_t num_bytes) except -1:
        raise ValueError(
            f"a payload of {num_bytes} bytes in a ring of {self._end - self._begin}"
        )


cdef class RingPayload:
    """Bytes that came, until they are given back. `lent`: they lie in another ring of the memory,
    and somebody else gives them back.
    """

    cdef readonly Py_ssize_t num_bytes
    cdef RingReader _reader
    cdef Py_ssize_t _begin
    cdef uint64_t _sequence
    cdef bint _is_own
    cdef bint _is_freed
    cdef object _view
    cdef object _hooks

    cpdef view(self, Py_ssize_t num_bytes):
        """The bytes where they lie, until free(). Closes the channel on another size."""
        self._check(num_bytes)
        if self._view is None:
            self._view = self._reader.view[self._begin : self._begin + num_bytes]
        return self._view

    cpdef into(self, target):
        """Copy all of them to memory of exactly that size, then free()."""
        cdef Py_buffer to
        PyObject_GetBuffer(target, &to, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            self._check(to.len)
            if to.len < LARGE:
                memcpy(to.buf, self._reader._base + self._begin, to.len)
            else:
                with nogil:
                    stream_copy(<char*>to.buf, self._reader._base + self._begin, to.len)
        finally:
            PyBuffer_Release(&to)
        self.free()

    cpdef free(self):
        """The sender may reuse their place. Idempotent. Closes the channel if it has done so
        already: what was read may have been anything.
        """
        if self._is_freed:
            return
        self._is_freed = True
        if self._view is not None:
            try:
                self._view.release()
            except BufferError:  # somebody made a tensor of it: the memory stays with that
                pass
            self._view = None
        if self._reader.is_closed:
            return
        settle_reads()
        if load_word(self._reader._mark(self._begin)) != self._sequence:
            words = self._reader._doubt(self._begin, self.num_bytes, self._sequence)
            self._hooks.fail(f"{words}: it was written while it was read")
        elif self._is_own:
            self._reader._done(self._sequence)

    def lend(self, memory):
        """What a packet tells of them to a process that maps `memory`, if they lie in it."""
        if memory is not self._reader.memory:
            return None
        return self._reader._span(self._begin, self.num_bytes, self._sequence)

    cdef int _check(self, Py_ssize_t num_bytes) except -1:
        assert not self._is_freed, "a payload that was freed"
        if self._reader.is_closed:
            self._hooks.fail("the channel of this payload is closed")
        if num_bytes != self.num_bytes:
            self._hooks.fail(
                f"a payload of {self.num_bytes} bytes came, {num_bytes} were expected"
            )
        return 0


cdef class RingReader(_Mapped):
    """Payloads that came, each of which is given back when it has been read, in any order.

    They may lie anywhere in `[lower, upper)`; only those of the ring itself are given back.
    `memory` is whatever the other processes that map it are known by; `span(begin, num_bytes,
    sequence)` makes what these are told of a payload.
    """

    cdef readonly object memory
    cdef object _span
    cdef Places _held
    cdef Py_ssize_t _lower
    cdef Py_ssize_t _upper
    cdef uint64_t _last

    def __init__(self, view, begin, end, word, first_sequence, wrong, lower, upper, memory, span):
        self._map(view, begin, end, word, wrong)
        if not 0 <= lower <= upper <= self._buffer.len:
            raise ValueError(f"[{lower}, {upper}) of a memory of {self._buffer.len} bytes")
        self.memory = memory
        self._span = span
        self._held = Places()
        self._lower, self._upper = lower, upper
        self._last = first_sequence - 1

    cpdef RingPayload accept(
        self, Py_ssize_t begin, Py_ssize_t num_bytes, uint64_t sequence, hooks
    ):
        """The payload that a packet tells of. Raises `wrong` for one that cannot be. `hooks.fail`
        closes the channel with words, and raises.
        """
        cdef RingPayload payload
        cdef bint is_own
        if self.is_closed:
            raise ValueError("a ring that was closed")
        if begin < self._lower + ALIGN or begin > self._upper or num_bytes > self._upper - begin:
            where = f"[{self._lower}, {self._upper})"
            raise self._wrong(f"{told(begin, num_bytes, sequence)} outside of {where}")
        if begin % ALIGN:
            raise self._wrong(f"{told(begin, num_bytes, sequence)}, not at a multiple of {ALIGN}")
        is_own = self._begin <= begin < self._end
        if is_own and sequence <= self._last:
            raise self._wrong(f"payload {sequence} again")
        if load_word(self._mark(begin)) != sequence:
            raise self._wrong(self._doubt(begin, num_bytes, sequence))
        if is_own:
            self._last = sequence
            self._held.push(sequence, begin, begin + num_bytes)
        payload = RingPayload.__new__(RingPayload)
        payload.num_bytes, payload._reader = num_bytes, self
        payload._begin, payload._sequence, payload._is_own = begin, sequence, is_own
        payload._hooks = hooks
        return payload

    cdef void _done(self, uint64_t sequence) noexcept:
        """Say how far all have been read, with this one."""
        cdef Py_ssize_t i
        cdef uint64_t value = 0
        for i in range(self._held.count):
            if self._held.at(i).sequence == sequence:
                self._held.at(i).is_done = True
                break
        while self._held.count and self._held.at(0).is_done:
            value = self._held.at(0).sequence
            self._held.pop()
        if value:
            store_word(self._read_word, value)

    cdef str _doubt(self, Py_ssize_t begin, Py_ssize_t num_bytes, uint64_t sequence):
        found = load_word(self._mark(begin))
        return f"{told(begin, num_bytes, sequence)}, where payload {found} lies"


cdef str told(Py_ssize_t begin, Py_ssize_t num_bytes, uint64_t sequence):
    return f"payload {sequence} was said to lie in [{begin}, {begin + num_bytes})"
