"""Part of rings.pyx: the end that reads."""


cdef class RingPayload:
    """A received payload, until it is freed. One that lies in another ring of the memory is freed by
    that ring's reader.
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
        """A view of the bytes in place, valid until free(). Closes the channel if the size differs."""
        self._check(num_bytes)
        if self._view is None:
            self._view = self._reader.view[self._begin : self._begin + num_bytes]
        return self._view

    cpdef into(self, target):
        """Copy the bytes to memory of exactly that size, then free()."""
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
        """Let the sender reuse the bytes. Idempotent. Closes the channel if they were overwritten
        already: then what was read is not the payload.
        """
        if self._is_freed:
            return
        self._is_freed = True
        if self._view is not None:
            try:
                self._view.release()
            except BufferError:  # a tensor was made of it, which keeps the memory
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
        """Describe the payload for a packet to a process that maps `memory`; None if it is not there."""
        if memory is not self._reader.memory:
            return None
        return self._reader._span(self._begin, self.num_bytes, self._sequence)

    cdef int _check(self, Py_ssize_t num_bytes) except -1:
        assert not self._is_freed, "the payload was freed already"
        if self._reader.is_closed:
            self._hooks.fail("the channel of this payload is closed")
        if num_bytes != self.num_bytes:
            self._hooks.fail(
                f"a payload of {self.num_bytes} bytes arrived; {num_bytes} were expected"
            )
        return 0


cdef class RingReader(_Mapped):
    """The reading end: payloads that are freed in any order.

    They may lie anywhere in `[lower, upper)`; only those in the ring itself are reported as read.
    `memory` identifies the mapping to other processes that share it; `span(begin, num_bytes,
    sequence)` describes a payload to them.
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
        """Return the payload that a packet describes. Raises `wrong` for an impossible one.
        `hooks.fail(reason)` closes the channel and raises.
        """
        cdef RingPayload payload
        cdef bint is_own
        if self.is_closed:
            raise ValueError("the ring is closed")
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
        """Mark a payload as read; publish up to which sequence all have been."""
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
