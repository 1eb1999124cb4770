# cython: language_level=3, boundscheck=False, wraparound=False
"""Packets of one session, as bytes and back, and the SEQPACKET socket that they go through.

Owns their order, and the memory that one is read into. What takes no time keeps the GIL: who lets
it go may wait for it, for milliseconds where another thread computes. Knows no message.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

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


cdef struct Header:
    uint64_t session
    uint64_t number
    uint64_t answers
    uint64_t begin
    uint64_t num_bytes
    uint64_t sequence

cdef enum:
    MAX_KNOWN = 32  # bytes of a message that is remembered: most answers are the same few bytes

HEADER_BYTES = sizeof(Header)
cdef Py_ssize_t HEADER = HEADER_BYTES
cdef uint64_t TOO_LARGE = <uint64_t>1 << 62


cdef class PacketCodec:
    """Packets of one session, in order: a header of six words, then the message."""

    cdef readonly object session
    cdef readonly uint64_t next_number  # of the packet that is sent next
    cdef uint64_t _session
    cdef uint64_t _num_received
    cdef Py_ssize_t _max_bytes
    cdef object _encode_into
    cdef object _decode
    cdef object _span
    cdef object _wrong
    cdef tuple _unreadable
    cdef bytearray _out
    cdef char _known[MAX_KNOWN]  # the bytes of the message that came last, if they are few
    cdef Py_ssize_t _num_known
    cdef object _known_message

    def __init__(self, session, encode_into, decode, span, max_bytes, wrong, unreadable):
        """`encode_into(message, bytearray, offset)`; `span(begin, num_bytes, sequence)` is what a
        packet tells of a payload. `wrong` is raised, with words, for what may not come,
        `unreadable` are what `decode` raises for it.
        """
        self.session = session
        self._session = session
        self.next_number = 1
        self._num_received = 0
        self._max_bytes = max_bytes
        self._encode_into = encode_into
        self._decode = decode
        self._span = span
        self._wrong = wrong
        self._unreadable = unreadable
        self._out = bytearray(256)

    def encode(self, message, answers=0, payload=None):
        """The next packet, which counts as sent. Raises ValueError for a message that no packet may
        hold.
        """
        self._pack(message, answers, payload)
        self.next_number += 1
        return bytes(self._out)

    def decode(self, raw):
        """(message, number, which of ours it answers or 0, payload or None) of the next packet of
        this session. Raises `wrong` for all else.
        """
        cdef const unsigned char[:] whole = raw
        cdef Header header
        message = self._unpack(raw, &whole[0] if len(whole) else NULL, &header)
        span = None
        if self._check_payload(&header):
            span = self._span(header.begin, header.num_bytes, header.sequence)
        return message, header.number, header.answers, span

    cdef int _pack(self, message, uint64_t answers, payload) except -1:
        """Leaves it in `_out`."""
        cdef Header header
        self._encode_into(message, self._out, HEADER)
        if PyByteArray_GET_SIZE(self._out) > self._max_bytes:
            name, num_bytes = type(message).__name__, len(self._out)
            raise ValueError(f"{name} takes {num_bytes} bytes; a packet ends at {self._max_bytes}")
        header.session, header.number, header.answers = self._session, self.next_number, answers
        header.begin = header.num_bytes = header.sequence = 0
        if payload is not None:
            header.begin = payload.begin
            header.num_bytes = payload.num_bytes
            header.sequence = payload.sequence
        memcpy(PyByteArray_AS_STRING(self._out), &header, HEADER)
        return 0

    cdef _unpack(self, raw, const void* begin, Header* header):
        """The message; the header is copied, and checked."""
        cdef Py_ssize_t num_bytes = len(raw)
        if num_bytes > self._max_bytes:
            raise self._wrong(f"a packet of {num_bytes} bytes; at most {self._max_bytes} may come")
        if num_bytes < HEADER:
            raise self._wrong(f"a packet of {num_bytes} bytes that is none: truncated")
        memcpy(header, begin, HEADER)
        if header.session != self._session:
            words = f"a packet of session {header.session:x}, not of {self._session:x}"
            raise self._wrong(words)
        if header.number != self._num_received + 1:
            expected = self._num_received + 1
            raise self._wrong(f"packet {header.number} came where {expected} was expected")
        if header.answers >= self.next_number:
            raise self._wrong(f"an answer to packet {header.answers}, which was never sent")
        message = self._message(raw, <const char*>begin + HEADER, num_bytes - HEADER)
        self._num_received += 1
        return message

    cdef _message(self, raw, const char* begin, Py_ssize_t num_bytes):
        """The one that is in these bytes of `raw`; messages cannot be changed."""
        if num_bytes and num_bytes == self._num_known:
            if memcmp(begin, self._known, num_bytes) == 0:
                return self._known_message
        try:
            message = self._decode(raw[HEADER:])
        except self._unreadable as error:
            words = str(error)[:MAX_SHOWN]
            raise self._wrong(f"a packet of {len(raw)} bytes that is none: {words}") from None
        if num_bytes <= MAX_KNOWN:
            memcpy(self._known, begin, num_bytes)
            self._num_known, self._known_message = num_bytes, message
        return message

    cdef int _check_payload(self, Header* header) except -1:
        """Whether there is one. Raises `wrong` for one that cannot be."""
        if not (header.begin or header.num_bytes or header.sequence):
            return False
        if not header.num_bytes or not header.sequence or TOO_LARGE <= max(
            header.begin, header.num_bytes, header.sequence
        ):
            raise self._wrong(
                f"a payload that is none: {header.num_bytes} bytes at {header.begin}, "
                f"number {header.sequence}"
            )
        return True


cdef class Traffic:
    """What has crossed a channel. Lent: payloads passed on by reference, whose bytes stayed."""

    cdef public uint64_t packets_sent
    cdef public uint64_t packets_received
    cdef public uint64_t packet_bytes_sent
    cdef public uint64_t packet_bytes_received
    cdef public uint64_t payload_bytes_sent
    cdef public uint64_t payload_bytes_received
    cdef public uint64_t payload_bytes_lent

    @property
    def num_bytes_sent(self):
        """Of packets and payloads."""
        return self.packet_bytes_sent + self.payload_bytes_sent

    @property
    def num_bytes_received(self):
        """Of packets and payloads."""
        return self.packet_bytes_received + self.payload_bytes_received


cdef class PacketPort:
    """One end of a socket, of which SO_RCVTIMEO bounds each sleep. `traffic` counts what crosses.

    What comes is `received(message, payload, number, answers)`; `accept` makes payloads of what
    packets tell of them, and `take_ping` hears of messages that are a `ping`.
    """

    cdef readonly int fd
    cdef readonly PacketCodec codec
    cdef readonly double waited_s  # by the last read
    cdef Traffic _traffic
    cdef object _received
    cdef object _ping
    cdef object _accept
    cdef object _hooks
    cdef object _whole
    cdef char* _buffer
    cdef Py_ssize_t _capacity

    def __init__(self, int fd, PacketCodec codec not None, Traffic traffic not None, received, ping, accept, hooks):
        """`accept(begin, num_bytes, sequence, hooks)`: the payload that a packet tells of."""
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

    cpdef send(self, message, uint64_t answers=0, payload=None):
        """The number of the packet, or None: the socket is full. Raises OSError, ValueError."""
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
        self._traffic.packets_sent += 1
        self._traffic.packet_bytes_sent += sent
        return number

    cpdef receive(self, double spin_s, bint sleeps):
        """What came next, or None where nothing but a ping comes within `spin_s`, a wait that keeps
        its core, and then, if it `sleeps`, within the socket's timeout. Raises the codec's `wrong`,
        OSError.
        """
        cdef Header header
        cdef Py_ssize_t found = self._read(spin_s, sleeps)
        if found < 0:
            return None
        if found == 0:
            raise self.codec._wrong("it is gone")
        if found > self._capacity:
            raise self.codec._wrong(f"a packet of {found} bytes; at most {self._capacity} may come")
        message = self.codec._unpack(self._whole[:found], self._buffer, &header)
        self._traffic.packets_received += 1
        self._traffic.packet_bytes_received += found
        cdef bint has_payload = self.codec._check_payload(&header)
        if message.__class__ is self._ping:
            self.take_ping(header.number, has_payload)
            return None
        payload = None
        if has_payload:
            payload = self._accept(header.begin, header.num_bytes, header.sequence, self._hooks)
            self._traffic.payload_bytes_received += header.num_bytes
        return self._received(message, payload, header.number, header.answers)

    def take_ping(self, number, has_payload):
        """Answer it when there is room."""
        raise NotImplementedError

    cdef Py_ssize_t _read(self, double spin_s, bint sleeps) except -4:
        """Bytes of the packet that came, as `_recv` has them; below 0: none."""
        if self._buffer == NULL:
            raise ValueError("a port without a socket")
        cdef Py_ssize_t found = self._recv(MSG_DONTWAIT)
        self.waited_s = 0
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
