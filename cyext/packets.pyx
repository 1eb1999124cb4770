# cython: language_level=3, boundscheck=False, wraparound=False
"""Packets of one session, as bytes and back, the SEQPACKET socket that they go through, and the way
that most of them take through a channel.

Owns their order, and the memory that one is read into. What takes no time keeps the GIL: who lets
it go may wait for it, for milliseconds where another thread computes. Knows no message.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

cdef Py_ssize_t MAX_SHOWN = 200  # characters of what a peer sent that stand in an error

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


include "packet_port.pxi"
include "quick_channel.pxi"
