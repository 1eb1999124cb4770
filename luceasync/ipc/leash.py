"""A child's first moments: from here on it dies with its parent, whatever it imports later.

Run as a script, by the parent's Python: leash.py PARENT_PID PROGRAM ARGUMENT... becomes PROGRAM.
Imports nothing of luceasync.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Tie this process to its parent, then become the program."""
    parent_pid, program = int(argv[1]), argv[2]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)
    # Python ignores this signal, and exec would preserve that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(program, argv[2:])
    except OSError as error:
        sys.exit(f"{program}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv)
