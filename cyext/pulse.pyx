# cython: language_level=3
"""Answers heartbeats without the GIL, so that a process that holds it for long is not taken for dead.

Pure C apart from the calls. Owns nothing; the descriptors are the caller's. Linux only.
"""

from libc.errno cimport EINTR, errno

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int POLLIN
    int poll(pollfd* fds, unsigned long num_fds, int timeout_ms)

cdef extern from "<sys/socket.h>" nogil:
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    ssize_t recv(int fd, void* buffer, size_t num_bytes, int flags)
    ssize_t send(int fd, const void* buffer, size_t num_bytes, int flags)

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, unsigned int first, unsigned int last, unsigned int flags)

cdef enum:
    MAX_BYTES = 64
    CLOSE_RANGE = 436  # on every architecture; older headers do not define it
    UNSHARE = 2


def keep_alone(int fd, int other):
    """Give the calling thread its own descriptor table with these two alone; return whether that
    worked.

    When a process is killed, its threads end first, and this table is closed with its thread; the
    descriptors of the process are closed only after all its memory was returned.
    """
    cdef unsigned int low = min(fd, other), high = max(fd, other)
    if low == 0 or syscall(CLOSE_RANGE, 0, low - 1, UNSHARE) != 0:
        return False
    if high > low + 1:
        syscall(CLOSE_RANGE, low + 1, high - 1, 0)
    syscall(CLOSE_RANGE, high + 1, <unsigned int>-1, 0)
    return True


def echo(int fd, int stop):
    """Send every packet of the socket back, until the other end is gone or `stop` is readable.

    A packet is dropped if the socket has no room for the answer.
    """
    cdef char buffer[MAX_BYTES]
    cdef ssize_t num_bytes
    cdef pollfd waiting[2]
    waiting[0].fd, waiting[1].fd = fd, stop
    waiting[0].events = waiting[1].events = POLLIN
    with nogil:
        while True:
            if poll(waiting, 2, -1) < 0:
                if errno == EINTR:
                    continue
                break
            if waiting[1].revents:
                break
            num_bytes = recv(fd, buffer, MAX_BYTES, MSG_DONTWAIT)
            if num_bytes <= 0:
                break
            send(fd, buffer, <size_t>num_bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
