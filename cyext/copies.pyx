# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Finds earlier occurrences of a text's last tokens, and what followed them.

An index of one text that grows at its end. Does not know lanes, requests or other texts.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

cdef enum:
    NUM_GRAMS = 3
    MAX_LENGTH = 64  # of a match: longer ones count as equal
    MIN_ROOM = 1024  # tokens
    LONG = 8  # a match of this many tokens, or a resumed one, is searched for again near its end
    SHORT = 4  # shorter matches elsewhere count less than a resumed one
    MAX_LOST = 16  # tokens that may lie in between
    NOTHING = -1
    GAP = -1  # between texts; no token

cdef int32_t[NUM_GRAMS] GRAMS = [8, 4, 2]  # tokens of the keys, longest first


cdef inline uint32_t hash_of(const int32_t* last, int num_tokens) noexcept nogil:
    """A hash of the `num_tokens` tokens that end with `last`."""
    cdef uint64_t mixed = 0x9E3779B97F4A7C15
    cdef int i
    for i in range(num_tokens):
        mixed = (mixed ^ <uint32_t>last[-i]) * <uint64_t>0xD6E8FEB86659FD93
        mixed ^= mixed >> 32
    return <uint32_t>mixed


cdef class CopyIndex:
    """The places of a text's last 2, 4 and 8 tokens, by hash: 16 bytes a token, and 12 for each
    entry of the tables; 42 bytes a token at most, beyond the first thousand.

    `find` tries the newest `num_tried` places of each length, the place where the last match
    continues, and places near where it was lost: after a changed word the copy usually continues.
    Safe to use from one thread at a time.
    """

    cdef int32_t* _ids
    cdef int32_t* _before[NUM_GRAMS]  # the previous place whose key has the same hash
    cdef int32_t* _newest[NUM_GRAMS]  # the newest place of each hash
    cdef Py_ssize_t _room, _num_slots, _end, _begin
    cdef int _num_tried
    cdef int32_t _place, _length  # of the last match
    cdef bint _is_resumed  # shorter than LONG, and near where a long match was lost
    cdef int32_t _lost, _since  # the token that differed, and how many were appended since
    cdef readonly bytes _ends  # int32s

    def __cinit__(self):
        self._ids = NULL
        for i in range(NUM_GRAMS):
            self._before[i] = self._newest[i] = NULL
        self._room = self._num_slots = self._end = self._begin = 0
        self._place, self._length = NOTHING, 0
        self._lost, self._since, self._is_resumed = NOTHING, 0, False

    def __init__(self, ends=(), int num_tried=16):
        """`ends`: tokens behind which nothing is proposed."""
        import array

        self._ends = array.array("i", sorted(ends)).tobytes()
        self._num_tried = num_tried

    def __dealloc__(self):
        free(self._ids)
        for i in range(NUM_GRAMS):
            free(self._before[i])
            free(self._newest[i])

    @property
    def num_tokens(self):
        """Tokens of the text, without those put before it."""
        return self._end - self._begin

    @property
    def num_bytes(self):
        return 4 * (self._room * (1 + NUM_GRAMS) + self._num_slots * NUM_GRAMS)

    def put_before(self, tokens):
        """Add another text to copy from, before the first token of the text itself. `tokens` as in
        `extend`.
        """
        if self._end > self._begin:
            raise ValueError("the text has begun")
        self._add(tokens, 0)
        self._reserve(self._end + 1)
        self._push(GAP)
        self._begin = self._end

    def extend(self, tokens, Py_ssize_t begin=0):
        """Append `tokens[begin:]`, a C-contiguous buffer of int32s that are not negative. Raises
        ValueError for other buffers, MemoryError.
        """
        self._add(tokens, begin)

    cdef int _add(self, object tokens, Py_ssize_t begin) except -1:
        cdef Py_buffer view
        cdef Py_ssize_t i, size
        cdef const int32_t* ids
        PyObject_GetBuffer(tokens, &view, PyBUF_ND | PyBUF_FORMAT)
        try:
            kind = view.format.decode() if view.format != NULL else "B"
            if view.ndim != 1 or view.itemsize != sizeof(int32_t) or kind not in ("i", "=i", "@i"):
                raise ValueError(f"tokens: expected one dimension of int32, got format {kind!r}")
            size, ids = view.shape[0], <const int32_t*>view.buf
            if begin < size:
                self._reserve(self._end + size - begin)
                with nogil:
                    for i in range(begin, size):
                        self._push(ids[i])
        finally:
            PyBuffer_Release(&view)
        return 0

    cdef int _reserve(self, Py_ssize_t num_tokens) except -1:
        """Make room for `num_tokens` tokens in all."""
        cdef Py_ssize_t room, num_slots, i
        cdef int gram
        if num_tokens <= self._room:
            return 0
        room = max(<Py_ssize_t>MIN_ROOM, num_tokens, self._room + self._room // 2)
        if room > 0x7FFFFFF0:
            raise MemoryError
        num_slots = MIN_ROOM
        while 2 * num_slots < room:
            num_slots *= 2
        self._ids = <int32_t*>grown(self._ids, room)
        for gram in range(NUM_GRAMS):
            self._before[gram] = <int32_t*>grown(self._before[gram], room)
            if num_slots != self._num_slots:
                self._newest[gram] = <int32_t*>grown(self._newest[gram], num_slots)
        self._room = room
        if num_slots != self._num_slots:
            self._num_slots = num_slots
            with nogil:
                for gram in range(NUM_GRAMS):
                    for i in range(num_slots):
                        self._newest[gram][i] = NOTHING
                for i in range(self._end):
                    self._link(i)
        return 0

    cdef void _push(self, int32_t token) noexcept nogil:
        """Append a token; there is room."""
        cdef Py_ssize_t at = self._end
        self._ids[at] = token
        self._end = at + 1
        if self._lost != NOTHING:
            self._since += 1
            if self._since > MAX_LOST:
                self._lost = NOTHING
        if self._place != NOTHING:
            if token != GAP and self._ids[self._place] == token:
                self._place += 1
                self._length = min(self._length + 1, <int>MAX_LENGTH)
                self._is_resumed = self._is_resumed and self._length < LONG
            else:
                if self._length >= LONG or self._is_resumed:
                    self._lost, self._since = self._place, 1
                self._place, self._length, self._is_resumed = NOTHING, 0, False
        self._link(at)

    cdef void _link(self, Py_ssize_t at) noexcept nogil:
        """Enter the keys that end at token `at`."""
        cdef uint32_t slot
        cdef int gram
        for gram in range(NUM_GRAMS):
            self._before[gram][at] = NOTHING
            if at + 1 >= GRAMS[gram] and self._ids[at] != GAP:
                slot = hash_of(self._ids + at, GRAMS[gram]) & <uint32_t>(self._num_slots - 1)
                self._before[gram][at] = self._newest[gram][slot]
                self._newest[gram][slot] = <int32_t>at

    cdef int _length_at(self, Py_ssize_t at) noexcept nogil:
        """How many of the tokens up to token `at` equal those at the text's end."""
        cdef int length = 0
        cdef Py_ssize_t last = self._end - 1
        while (
            length < MAX_LENGTH
            and length <= at
            and self._ids[at - length] == self._ids[last - length]
            and self._ids[at - length] != GAP
        ):
            length += 1
        return length

    cdef (Py_ssize_t, int) _resumed(self) noexcept nogil:
        """(place, length) of the longest match in the tokens after the lost one; among equally
        long ones, the least shifted.
        """
        cdef Py_ssize_t best = NOTHING, place, shift, best_shift = 0
        cdef int length, best_length = 0
        for place in range(self._lost + 1, min(self._lost + MAX_LOST, self._end - 1) + 1):
            length = min(self._length_at(place - 1), self._since)
            shift = place - self._lost - self._since
            shift = -shift if shift < 0 else shift
            if length > best_length or (length == best_length and length and shift < best_shift):
                best, best_length, best_shift = place, length, shift
        return best, best_length

    @property
    def is_lost(self):
        """Whether a match may be resumed after the next token."""
        return self._lost != NOTHING or self._length >= LONG or self._is_resumed

    def find(self):
        """(place, length, is_resumed) of the longest match: the text's last `length` tokens also
        precede token `place`, which is not the end. The newest of equally long ones; (-1, 0, False)
        if there is none. `is_resumed`: it is near where a long match was lost; it is preferred to
        matches of fewer than four tokens elsewhere.
        """
        cdef int gram, num_left, length, best_length = 0
        cdef int32_t at
        cdef Py_ssize_t best = NOTHING, place
        cdef bint is_resumed = False
        with nogil:
            for gram in range(NUM_GRAMS):
                if best_length >= GRAMS[gram] or self._end < GRAMS[gram]:
                    continue
                num_left, at = self._num_tried, self._before[gram][self._end - 1]
                while at != NOTHING and num_left:
                    length = self._length_at(at)
                    if length > best_length and length >= GRAMS[gram]:
                        best, best_length = at + 1, length
                    num_left -= 1
                    at = self._before[gram][at]
            if self._length > best_length or (self._is_resumed and best_length < SHORT):
                best, best_length, is_resumed = self._place, self._length, self._is_resumed
            elif self._lost != NOTHING and best_length < SHORT:
                place, length = self._resumed()
                if length:
                    best, best_length, is_resumed = place, length, True
            self._place, self._length = <int32_t>best, best_length
            self._is_resumed = is_resumed
            if best_length >= LONG or is_resumed:
                self._lost = NOTHING
        return best, best_length, is_resumed

    def copied(self, Py_ssize_t place, Py_ssize_t num_tokens):
        """The tokens that follow from token `place`, at most `num_tokens`: up to a gap, or a token
        that ends texts, which is included. A copy that reaches the text's end continues with its
        own tokens, as a repetition.
        """
        cdef Py_ssize_t i, period = self._end - place
        cdef int32_t token
        cdef const int32_t* ends = <const int32_t*><const char*>self._ends
        cdef Py_ssize_t num_ends = len(self._ends) // 4, j
        cdef list found = []
        if place < 0 or period <= 0:
            return found
        for i in range(num_tokens):
            token = self._ids[place + i % period]
            if token == GAP:
                break
            found.append(token)
            for j in range(num_ends):
                if ends[j] == token:
                    return found
        return found

    def num_equal(self, Py_ssize_t place, Py_ssize_t begin, Py_ssize_t most):
        """How many of the tokens from `begin` on equal those from the earlier token `place` on; at
        most `most`. `begin` counts the tokens put before the text, too: see `end`.
        """
        cdef Py_ssize_t i = 0
        most = min(most, self._end - begin)
        while i < most and self._ids[place + i] == self._ids[begin + i]:
            i += 1
        return i

    @property
    def end(self):
        """Number of the next token, counting those put before the text."""
        return self._end

    def copy(self):
        """An index of the same text, to which other tokens may be appended."""
        cdef CopyIndex other = CopyIndex.__new__(CopyIndex)
        cdef int gram
        other._ends, other._num_tried = self._ends, self._num_tried
        if self._room:
            other._ids = <int32_t*>copy_of(self._ids, self._room)
            for gram in range(NUM_GRAMS):
                other._before[gram] = <int32_t*>copy_of(self._before[gram], self._room)
                other._newest[gram] = <int32_t*>copy_of(self._newest[gram], self._num_slots)
        other._room, other._num_slots = self._room, self._num_slots
        other._end, other._begin = self._end, self._begin
        other._place, other._length = self._place, self._length
        other._lost, other._since = self._lost, self._since
        other._is_resumed = self._is_resumed
        return other


cdef void* grown(void* items, Py_ssize_t num_items) except NULL:
    """Resize an array of int32s; the first ones are kept."""
    cdef void* found = realloc(items, num_items * sizeof(int32_t))
    if found == NULL:
        raise MemoryError
    return found


cdef void* copy_of(const void* items, Py_ssize_t num_items) except NULL:
    cdef void* found = grown(NULL, num_items)
    memcpy(found, items, num_items * sizeof(int32_t))
    return found
