# cython: language_level=3, boundscheck=False, wraparound=False
"""Packets of one session, as bytes and back, and the SEQPACKET socket that they go through.

Owns their order, and the memory that one is read into. What takes no time keeps the GIL: who lets
it go may wait for it, for milliseconds where another thread computes. Knows no message.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno

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

cdef Py_ssize_t MAX_SHOWN = 200  # characters of what a peer sent that stand in an error
cdef enum:
    NOTHING = -1
    FAILED = -2  # errno says why
    INTERRUPTED = -3


cdef class PacketCodec:
    """Packets of one session, in order, which are what `packet` makes and `decode` gives."""

    cdef readonly object session
    cdef public object next_number  # of the packet that is sent next
    cdef object _num_received
    cdef Py_ssize_t _max_bytes
    cdef object _packet
    cdef object _encode
    cdef object _decode
    cdef object _wrong
    cdef tuple _unreadable

    def __init__(self, session, packet, encode, decode, max_bytes, wrong, unreadable):
        """`packet(session, number, body, answers, payload)`; `wrong` is raised, with words, for
        what may not come, `unreadable` are what `decode` raises for it.
        """
        self.session = session
        self.next_number = 1
        self._num_received = 0
        self._max_bytes = max_bytes
        self._packet = packet
        self._encode = encode
        self._decode = decode
        self._wrong = wrong
        self._unreadable = unreadable

    cpdef bytes encode(self, body, answers=0, payload=None):
        """The next packet; it counts as sent once `next_number` has been raised.

        Raises ValueError for a message that no packet may hold.
        """
        cdef bytes raw = self._encode(
            self._packet(self.session, self.next_number, body, answers, payload)
        )
        if PyBytes_GET_SIZE(raw) > self._max_bytes:
            raise ValueError(
                f"{type(body).__name__} takes {len(raw)} bytes; a packet ends at {self._max_bytes}"
            )
        return raw

    cpdef decode(self, raw):
        """The packet. Raises `wrong` for all that is not the next one of this session."""
        if len(raw) > self._max_bytes:
            raise self._wrong(
                f"a packet of {len(raw)} bytes; at most {self._max_bytes} may come"
            )
        try:
            packet = self._decode(raw)
        except self._unreadable as error:
            words = str(error)[:MAX_SHOWN]
            raise self._wrong(f"a packet of {len(raw)} bytes that is none: {words}") from None
        if packet.session != self.session:
            raise self._wrong(f"a packet of session {packet.session:x}, not of {self.session:x}")
        expected = self._num_received + 1
        if packet.number != expected:
            raise self._wrong(f"packet {packet.number} came where {expected} was expected")
        if packet.answers >= self.next_number:
            raise self._wrong(f"an answer to packet {packet.answers}, which was never sent")
        self._num_received = expected
        return packet


cdef class PacketPort:
    """One end of a socket, of which SO_RCVTIMEO bounds each sleep. `traffic` counts what crosses.

    What comes is `received(message, payload, number, answers)`; `accept` makes payloads of what
    packets tell of them, and `take_ping` is given packets whose message is a `ping`.
    """

    cdef readonly int fd
    cdef readonly PacketCodec codec
    cdef readonly double waited_s  # by the last read
    cdef object _traffic
    cdef object _received
    cdef object _ping
    cdef object _accept
    cdef object _hooks
    cdef object _whole
    cdef char* _buffer
    cdef Py_ssize_t _capacity

    def __init__(self, int fd, PacketCodec codec not None, traffic, received, ping, accept, hooks):
        """`accept(span, hooks)`: the payload that a packet tells of."""
        self.fd = fd
        self.codec = codec
        self._traffic = traffic
        self._received = received
        self._ping = ping
        self._accept = accept
        self._hooks = hooks
        self._capacity = codec._max_bytes
        cdef bytearray store = bytearray(self._capacity)
        self._buffer = PyByteArray_AS_STRING(store)
        self._whole = memoryview(store)  # while there is a view of it, it stays where it is

    cpdef send(self, body, answers=0, payload=None):
        """The number of the packet, or None: the socket is full. Raises OSError, ValueError."""
        cdef bytes raw = self.codec.encode(body, answers, payload)
        cdef ssize_t sent = -1
        while sent < 0:
            sent = send(
                self.fd, PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw), MSG_NOSIGNAL | MSG_DONTWAIT
            )
            if sent < 0:
                if errno == EAGAIN:
                    return None
                if errno != EINTR:
                    PyErr_SetFromErrno(OSError)
                PyErr_CheckSignals()
        number = self.codec.next_number
        self.codec.next_number = number + 1
        self._traffic.packets_sent += 1
        self._traffic.packet_bytes_sent += sent
        return number

    cpdef receive(self, double spin_s, bint sleeps):
        """What came next, or None where nothing but a ping comes within `spin_s`, a wait that keeps
        its core, and then, if it `sleeps`, within the socket's timeout. Raises the codec's `wrong`,
        OSError.
        """
        packet = self._read(spin_s, sleeps)
        if packet is None:
            return None
        body, span = packet.body, packet.payload
        if body.__class__ is self._ping:
            self.take_ping(packet)
            return None
        payload = None
        if span is not None:
            payload = self._accept(span, self._hooks)
            self._traffic.payload_bytes_received += span.num_bytes
        return self._received(body, payload, packet.number, packet.answers)

    def take_ping(self, packet):
        """Answer it when there is room."""
        raise NotImplementedError

    cdef _read(self, double spin_s, bint sleeps):
        cdef Py_ssize_t found
        if self._buffer == NULL:
            raise ValueError("a port without a socket")
        found = self._recv(MSG_DONTWAIT)
        self.waited_s = 0
        if found == NOTHING and (spin_s > 0 or sleeps):
            with nogil:
                found = self._wait(spin_s, sleeps)
        if found == FAILED:
            PyErr_SetFromErrno(OSError)
        if found == INTERRUPTED:
            PyErr_CheckSignals()
        if found < 0:
            return None
        if found == 0:
            raise self.codec._wrong("it is gone")
        if found > self._capacity:
            raise self.codec._wrong(
                f"a packet of {found} bytes; at most {self._capacity} may come"
            )
        packet = self.codec.decode(self._whole[:found])
        self._traffic.packets_received += 1
        self._traffic.packet_bytes_received += found
        return packet

    cdef Py_ssize_t _wait(self, double spin_s, bint sleeps) noexcept nogil:
        cdef Py_ssize_t found = NOTHING
        cdef double begun = seconds()
        cdef double until = begun + spin_s
        while found == NOTHING and seconds() < until:
            relax()
            found = self._recv(MSG_DONTWAIT)
        if found == NOTHING and sleeps:
            found = self._recv(0)
        self.waited_s = seconds() - begun
        return found

    cdef Py_ssize_t _recv(self, int flags) noexcept nogil:
        """Bytes of a packet, more than there is room for where it was cut; 0 at the end."""
        cdef Py_ssize_t found = recv(self.fd, self._buffer, self._capacity, flags | MSG_TRUNC)
        if found >= 0:
            return found
        if errno == EAGAIN:
            return NOTHING
        return INTERRUPTED if errno == EINTR else FAILED
