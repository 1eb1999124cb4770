"""Part of rings.pyx: the end that writes."""


cdef class Room:
    """Bytes `[begin, begin + num_bytes)` of the memory, for a payload of this number."""

    cdef readonly Py_ssize_t begin
    cdef readonly Py_ssize_t num_bytes
    cdef readonly object sequence
    cdef readonly object view


cdef class RingWriter(_Mapped):
    """The writing end: reserves at the head; payloads that were read become free at the tail.

    `wrong` is raised if the other end wrote an impossible value.
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
        """Reserve room for a payload; None until others have been read.

        Raises ValueError for one that can never fit.
        """
        cdef uint64_t read
        cdef Py_ssize_t taken, begin
        cdef Room room
        if self.is_closed:
            raise ValueError("the ring is closed")
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
        store_word(self._mark(room.begin), 0)  # a late reader of the old payload notices
        return room

    cpdef commit(self, room):
        """Publish the payload under its sequence: its bytes are final."""
        cdef Room own = <Room?>room  # TypeError for the room of another channel
        if self.is_closed:
            raise ValueError("the ring is closed")
        store_word(self._mark(own.begin), own.sequence)
        return own

    cpdef bint push(self):
        """Return True: a committed payload is where it is read, so nothing is left to send."""
        return True

    cdef Py_ssize_t _find(self, Py_ssize_t taken) noexcept:
        cdef Py_ssize_t tail
        if not self._in_use.count:
            return self._begin  # reuse the same bytes, which are in the caches
        tail = self._in_use.at(0).begin
        if self._head > tail:
            if self._head + taken <= self._end:
                return self._head
            return self._begin if self._begin + taken <= tail else -1
        return self._head if self._head + taken <= tail else -1

    cdef int _free_until(self, uint64_t read) except -1:
        if not self._num_read < read < self._next:
            raise self._wrong(f"it claims to have read payload {read}, which was not sent")
        self._num_read = read
        while self._in_use.count and self._in_use.at(0).sequence <= read:
            self._in_use.pop()
        return 0

    cdef int _refuse(self, Py_ssize_t num_bytes) except -1:
        raise ValueError(
            f"a payload of {num_bytes} bytes in a ring of {self._end - self._begin}"
        )
