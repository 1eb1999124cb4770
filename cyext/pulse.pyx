# cython: language_level=3
"""Answers signs of life without the interpreter: whoever holds its lock for long is not dead.

Pure C apart from the call. Owns nothing; the descriptor is the caller's.
"""

from libc.errno cimport EINTR, errno

cdef extern from "<sys/socket.h>" nogil:
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    ssize_t recv(int fd, void* buffer, size_t num_bytes, int flags)
    ssize_t send(int fd, const void* buffer, size_t num_bytes, int flags)

cdef enum:
    MAX_BYTES = 64


def echo(int fd):
    """Send every packet of the socket back, until the other end is gone or the socket is shut down.

    A packet for which there is no room is not answered.
    """
    cdef char buffer[MAX_BYTES]
    cdef ssize_t num_bytes
    with nogil:
        while True:
            num_bytes = recv(fd, buffer, MAX_BYTES, 0)
            if num_bytes < 0 and errno == EINTR:
                continue
            if num_bytes <= 0:
                break
            send(fd, buffer, <size_t>num_bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
