"""Part of packets.pyx: the socket that packets go through, and how a wait for one spins."""

cdef extern from "<sys/socket.h>" nogil:
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    int MSG_TRUNC
    ssize_t send(int fd, const void* buffer, size_t num_bytes, int flags)
    ssize_t recv(int fd, void* buffer, size_t num_bytes, int flags)

cdef extern from *:
    """
    #include <time.h>
    static double seconds(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec + now.tv_nsec * 1e-9;
    }
    #if defined(__x86_64__) || defined(__i386__)
    #define relax() __builtin_ia32_pause()
    #else
    #define relax() ((void)0)
    #endif
    """
    double seconds() noexcept nogil
    void relax() noexcept nogil

cdef double SOME_S = 1.0  # any limit above 0 means one read, bounded by the socket's timeout
cdef enum:
    NOTHING = -1
    FAILED = -2  # see errno
    INTERRUPTED = -3


cdef class Patience:
    """Decides whether to spin before sleeping: yes, as long as spins succeed.

    Waking a sleeper takes longer than a hop. But spinning for something that arrives later wastes a
    core, and on a machine with few cores it keeps the other end from working.
    """

    cdef readonly double spin_s  # how long to spin now
    cdef double _max_s
    cdef bint _trusts_sleep
    cdef int _max_credit
    cdef int _credit  # spins that may fail in a row before spinning stops
    cdef int _probe_every
    cdef long _num_unpaid

    def __init__(self, double max_s, *, bint trusts_sleep, int max_credit, int probe_every):
        """`trusts_sleep`: a short sleep shows that spinning would pay again. On busy cores it does
        not: the other end may have run on this end's core meanwhile.

        A spin that succeeds earns credit for one that fails, up to `max_credit`. Without credit,
        one wait in `probe_every` spins.
        """
        self.spin_s = self._max_s = max_s
        self._trusts_sleep = trusts_sleep
        self._credit = self._max_credit = max_credit
        self._probe_every = probe_every
        self._num_unpaid = 0

    cpdef void waited(self, double seconds) noexcept:
        """Record a finished wait, spun or slept."""
        if seconds <= self._max_s and (self.spin_s > 0 or self._trusts_sleep):
            self._credit = min(self._max_credit, self._credit + 1)
            self._num_unpaid = 0
        else:
            self._num_unpaid += 1
            if self.spin_s > 0:
                self._credit = max(0, self._credit - 1)
        cdef bint spins = self._credit > 0 or self._num_unpaid % self._probe_every == 0
        self.spin_s = self._max_s if spins else 0


cdef class Received:
    """A message with its payload, its number, and the number of the packet that it answers (0: none).

    The receiver of a payload frees it.
    """

    cdef readonly object message
    cdef readonly object payload
    cdef readonly uint64_t number
    cdef readonly uint64_t answers

    def __init__(self, message, payload, uint64_t number, uint64_t answers):
        self.message, self.payload = message, payload
        self.number, self.answers = number, answers

    def __class_getitem__(cls, item):
        return cls  # the type of message matters to type checkers only


cdef class PacketPort:
    """One end of a socket whose SO_RCVTIMEO bounds each sleep. `traffic` counts what crosses.

    `accept` makes a payload of its description in a packet. A message of class `ping` goes to
    `take_ping`; `pings` are those whose answer still waits for room in the socket.
    """

    cdef readonly int fd
    cdef readonly PacketCodec codec
    cdef readonly Traffic traffic
    cdef public object pings
    cdef public Patience patience
    cdef object _ping
    cdef object _accept
    cdef object _hooks
    cdef double _waited_s  # during the last read
    cdef object _whole
    cdef char* _buffer
    cdef Py_ssize_t _capacity

    def __init__(self, int fd, PacketCodec codec not None, Patience patience not None, ping, accept, hooks):
        """`accept(begin, num_bytes, sequence, hooks)` returns the payload that a packet describes."""
        self.fd = fd
        self.codec = codec
        self.traffic = Traffic()
        self.patience = patience
        self.pings = ()
        self._ping = ping
        self._accept = accept
        self._hooks = hooks
        self._capacity = codec._max_bytes
        cdef bytearray store = bytearray(self._capacity)
        self._buffer = PyByteArray_AS_STRING(store)
        self._whole = memoryview(store)  # an exported view keeps the bytearray in place

    cpdef send(self, message, uint64_t answers=0, payload=None):
        """Send a packet; return its number, or None if the socket is full. Raises OSError, ValueError."""
        cdef ssize_t sent = -1
        self.codec._pack(message, answers, payload)
        cdef bytearray out = self.codec._out
        while sent < 0:
            sent = send(
                self.fd,
                PyByteArray_AS_STRING(out),
                PyByteArray_GET_SIZE(out),
                MSG_NOSIGNAL | MSG_DONTWAIT,
            )
            if sent < 0:
                if errno == EAGAIN:
                    return None
                if errno != EINTR:
                    PyErr_SetFromErrno(OSError)
                PyErr_CheckSignals()
        number = self.codec.next_number
        self.codec.next_number += 1
        self.traffic.packets_sent += 1
        self.traffic.packet_bytes_sent += sent
        return number

    cpdef Received receive(self, double limit_s):
        """Return the next message, or None if only a ping or nothing arrives: first spin as long as
        `patience` says, then sleep up to the socket's timeout. With limit_s = 0 do neither. Raises
        the codec's `wrong`, OSError.
        """
        cdef Received got = self._receive(min(self.patience.spin_s, limit_s), limit_s > 0)
        if got is not None:
            self.patience.waited(self._waited_s)
        return got

    cpdef Received receive_late(self, bint sleeps):
        """As `receive`, without spinning, for a wait that has begun already: the caller reports its
        length to `patience`.
        """
        return self._receive(0, sleeps)

    cdef Received _receive(self, double spin_s, bint sleeps):
        cdef Header header
        cdef Py_ssize_t found = self._read(spin_s, sleeps)
        if found < 0:
            return None
        if found == 0:
            raise self.codec._wrong("it is gone")
        if found > self._capacity:
            raise self.codec._wrong(f"a packet of {found} bytes; the limit is {self._capacity}")
        message = self.codec._unpack(self._whole[:found], self._buffer, &header)
        self.traffic.packets_received += 1
        self.traffic.packet_bytes_received += found
        cdef bint has_payload = self.codec._check_payload(&header)
        if message.__class__ is self._ping:
            self.take_ping(header.number, has_payload)
            return None
        payload = None
        if has_payload:
            payload = self._accept(header.begin, header.num_bytes, header.sequence, self._hooks)
            self.traffic.payload_bytes_received += header.num_bytes
        cdef Received got = Received.__new__(Received)
        got.message, got.payload = message, payload
        got.number, got.answers = header.number, header.answers
        return got

    def take_ping(self, number, has_payload):
        """Answer a ping as soon as there is room."""
        raise NotImplementedError

    cdef Py_ssize_t _read(self, double spin_s, bint sleeps) except -4:
        """Read a packet; return its size as `_recv` does, below 0 if there was none."""
        if self._buffer == NULL:
            raise ValueError("a port without a socket")
        cdef Py_ssize_t found = self._recv(MSG_DONTWAIT)
        self._waited_s = 0
        if found == NOTHING and (spin_s > 0 or sleeps):
            with nogil:
                found = self._wait(spin_s, sleeps)
        if found == FAILED:
            PyErr_SetFromErrno(OSError)
        if found == INTERRUPTED:
            PyErr_CheckSignals()
        return found

    cdef Py_ssize_t _wait(self, double spin_s, bint sleeps) noexcept nogil:
        cdef Py_ssize_t found = NOTHING
        cdef double begun = seconds()
        cdef double until = begun + spin_s
        while found == NOTHING and seconds() < until:
            relax()
            found = self._recv(MSG_DONTWAIT)
        if found == NOTHING and sleeps:
            found = self._recv(0)
        self._waited_s = seconds() - begun
        return found

    cdef Py_ssize_t _recv(self, int flags) noexcept nogil:
        """Return the full size of a packet, even if it was truncated; 0 at end of file."""
        cdef Py_ssize_t found = recv(self.fd, self._buffer, self._capacity, flags | MSG_TRUNC)
        if found >= 0:
            return found
        if errno == EAGAIN:
            return NOTHING
        return INTERRUPTED if errno == EINTR else FAILED
