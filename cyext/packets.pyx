# cython: language_level=3, boundscheck=False, wraparound=False
"""Packets of one session: encoding, the SEQPACKET socket that carries them, and the fast path through
a channel.

Owns their order and the receive buffer. Short calls keep the GIL: once released, getting it back can
take milliseconds while another thread computes. Knows no message type.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

cdef Py_ssize_t MAX_SHOWN = 200  # characters of a peer's data that an error quotes

cdef struct Header:
    uint64_t session
    uint64_t number
    uint64_t answers
    uint64_t begin
    uint64_t num_bytes
    uint64_t sequence

cdef enum:
    MAX_KNOWN = 32  # bytes; a short message is cached, since most answers are the same few bytes

HEADER_BYTES = sizeof(Header)
cdef Py_ssize_t HEADER = HEADER_BYTES
cdef uint64_t TOO_LARGE = <uint64_t>1 << 62


cdef class PacketCodec:
    """Packets of one session, in order: a header of six words, then the message."""

    cdef readonly object session
    cdef readonly uint64_t next_number  # of the next packet to send
    cdef uint64_t _session
    cdef uint64_t _num_received
    cdef Py_ssize_t _max_bytes
    cdef object _encode_into
    cdef object _decode
    cdef object _span
    cdef object _wrong
    cdef tuple _unreadable
    cdef bytearray _out
    cdef char _known[MAX_KNOWN]  # the bytes of the cached message
    cdef Py_ssize_t _num_known
    cdef object _known_message

    def __init__(self, session, encode_into, decode, span, max_bytes, wrong, unreadable):
        """`encode_into(message, bytearray, offset)` writes a message; `span(begin, num_bytes,
        sequence)` describes a payload. `wrong` is the error for an invalid packet; `unreadable`
        are the errors that `decode` raises for an invalid message.
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
        """Encode the next packet and count it as sent. Raises ValueError if it would be too large."""
        self._pack(message, answers, payload)
        self.next_number += 1
        return bytes(self._out)

    def decode(self, raw):
        """Decode the next packet of this session: (message, number, number of the packet that it
        answers or 0, payload or None). Raises `wrong` for anything else.
        """
        cdef const unsigned char[:] whole = raw
        cdef Header header
        message = self._unpack(raw, &whole[0] if len(whole) else NULL, &header)
        span = None
        if self._check_payload(&header):
            span = self._span(header.begin, header.num_bytes, header.sequence)
        return message, header.number, header.answers, span

    cdef int _pack(self, message, uint64_t answers, payload) except -1:
        """Write the packet to `_out`."""
        cdef Header header
        self._encode_into(message, self._out, HEADER)
        if PyByteArray_GET_SIZE(self._out) > self._max_bytes:
            name, num_bytes = type(message).__name__, len(self._out)
            raise ValueError(f"{name} takes {num_bytes} bytes; a packet holds at most {self._max_bytes}")
        header.session, header.number, header.answers = self._session, self.next_number, answers
        header.begin = header.num_bytes = header.sequence = 0
        if payload is not None:
            header.begin = payload.begin
            header.num_bytes = payload.num_bytes
            header.sequence = payload.sequence
        memcpy(PyByteArray_AS_STRING(self._out), &header, HEADER)
        return 0

    cdef _unpack(self, raw, const void* begin, Header* header):
        """Check and copy the header; return the message."""
        cdef Py_ssize_t num_bytes = len(raw)
        if num_bytes > self._max_bytes:
            raise self._wrong(f"a packet of {num_bytes} bytes; the limit is {self._max_bytes}")
        if num_bytes < HEADER:
            raise self._wrong(f"a malformed packet of {num_bytes} bytes: truncated")
        memcpy(header, begin, HEADER)
        if header.session != self._session:
            words = f"a packet of session {header.session:x}; this is {self._session:x}"
            raise self._wrong(words)
        if header.number != self._num_received + 1:
            expected = self._num_received + 1
            raise self._wrong(f"packet {header.number} arrived; {expected} was expected")
        if header.answers >= self.next_number:
            raise self._wrong(f"an answer to packet {header.answers}, which was never sent")
        message = self._message(raw, <const char*>begin + HEADER, num_bytes - HEADER)
        self._num_received += 1
        return message

    cdef _message(self, raw, const char* begin, Py_ssize_t num_bytes):
        """Decode the message in these bytes of `raw`. Messages are immutable, so one may be shared."""
        if num_bytes and num_bytes == self._num_known:
            if memcmp(begin, self._known, num_bytes) == 0:
                return self._known_message
        try:
            message = self._decode(raw[HEADER:])
        except self._unreadable as error:
            words = str(error)[:MAX_SHOWN]
            raise self._wrong(f"a malformed packet of {len(raw)} bytes: {words}") from None
        if num_bytes <= MAX_KNOWN:
            memcpy(self._known, begin, num_bytes)
            self._num_known, self._known_message = num_bytes, message
        return message

    cdef int _check_payload(self, Header* header) except -1:
        """Return whether there is a payload. Raises `wrong` for an impossible one."""
        if not (header.begin or header.num_bytes or header.sequence):
            return False
        if not header.num_bytes or not header.sequence or TOO_LARGE <= max(
            header.begin, header.num_bytes, header.sequence
        ):
            raise self._wrong(
                f"a malformed payload: {header.num_bytes} bytes at {header.begin}, "
                f"number {header.sequence}"
            )
        return True


cdef class Traffic:
    """What has crossed a channel. Lent payloads were passed on by reference: their bytes stayed."""

    cdef public uint64_t packets_sent
    cdef public uint64_t packets_received
    cdef public uint64_t packet_bytes_sent
    cdef public uint64_t packet_bytes_received
    cdef public uint64_t payload_bytes_sent
    cdef public uint64_t payload_bytes_received
    cdef public uint64_t payload_bytes_lent

    @property
    def num_bytes_sent(self):
        """Bytes of packets and payloads."""
        return self.packet_bytes_sent + self.payload_bytes_sent

    @property
    def num_bytes_received(self):
        """Bytes of packets and payloads."""
        return self.packet_bytes_received + self.payload_bytes_received


include "packet_port.pxi"
include "quick_channel.pxi"
