"""Part of rings.pyx: the bytes in use, in the order of their payloads."""

cdef struct Place:
    uint64_t sequence
    Py_ssize_t begin
    Py_ssize_t end
    bint is_done


cdef class Places:
    """A growing queue of places, in the order in which they were reserved or received."""

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
