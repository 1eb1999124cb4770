"""Part of packets.pyx: the fast path of a channel, for messages that are sent at once or come in one
read.

A wait between messages leaves a core's caches cold, and then each Python call costs microseconds:
there are few here.
"""

from libc.math cimport round


cdef class QuickChannel:
    """The calls of a channel whose other end is quick. Everything else is left to the subclass, which
    has `send_on`, `reserve_later`, `next_message`, `answer_later`, `look`, `put_aside` and `fail`.
    """

    cdef public object closed
    cdef readonly Traffic traffic
    cdef PacketPort _port
    cdef readonly object _came
    cdef object _reserve
    cdef object _commit
    cdef object _push
    cdef object _gone
    cdef tuple _ends

    def __init__(self, PacketPort packets not None, outbox, came, gone, ends):
        """`came`: a deque of messages that were received but not asked for yet. A closed channel
        raises `gone`; `ends` are the errors that close it.
        """
        self.closed = None
        self.traffic = packets.traffic
        self._port = packets
        self._came = came
        self._reserve, self._commit, self._push = outbox.reserve, outbox.commit, outbox.push
        self._gone = gone
        self._ends = ends

    def __class_getitem__(cls, item):
        return cls  # the type of message matters to type checkers only

    def reserve(self, Py_ssize_t num_bytes, double deadline_s):
        """Reserve room for a payload."""
        self._check_open()
        try:
            room = self._reserve(num_bytes)
            return self.reserve_later(num_bytes, deadline_s) if room is None else room
        except self._ends as error:
            self.fail(str(error))

    def send(self, message, payload=None, *, uint64_t answers=0, double deadline_s):
        """Send a packet; return its number."""
        return self._send(message, payload, answers, deadline_s)

    def receive(self, double deadline_s):
        """Wait for the next message."""
        self._check_open()
        if self._came:
            return self._came.popleft()
        try:
            got = self._port.receive(SOME_S)
            return self.next_message(deadline_s) if got is None else got
        except self._ends as error:
            self.fail(str(error))

    def answer(self, uint64_t number, kind, double deadline_s):
        """Wait for the answer to packet `number`."""
        return self._answer(number, kind, deadline_s)

    def call(self, message, kind, payload=None, *, double deadline_s):
        """Send a message and wait for its answer, both within the deadline."""
        cdef double begun = seconds()
        number = self._send(message, payload, 0, deadline_s)
        cdef double left_s = round((deadline_s - (seconds() - begun)) * 100) / 100
        return self._answer(number, kind, max(0.0, left_s))

    cdef int _check_open(self) except -1:
        if self.closed is not None:
            raise self._gone(self.closed)
        return 0

    cdef object _send(self, message, payload, uint64_t answers, double deadline_s):
        cdef bint is_pushed = True
        self._check_open()
        try:
            span = None
            if payload is not None:
                span = self._commit(payload)
                self.traffic.payload_bytes_sent += span.num_bytes
                # Bytes first, as far as there is room, so that the other end wakes once.
                is_pushed = self._push()
            number = self._port.send(message, answers, span)
            if number is not None and is_pushed and not self._port.pings:
                return number
            return self.send_on(message, span, answers, deadline_s, number, is_pushed)
        except self._ends as error:
            self.fail(str(error))

    cdef object _answer(self, uint64_t number, kind, double deadline_s):
        cdef Received got
        self._check_open()
        try:
            if not self._came:  # the answer usually comes next
                got = self._port.receive(SOME_S)
                if got is None:
                    self.look()
                elif got.answers == number and isinstance(got.message, kind):
                    return got
                else:
                    self.put_aside(got)
            return self.answer_later(number, kind, deadline_s)
        except self._ends as error:
            self.fail(str(error))
