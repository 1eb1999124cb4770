"""A process that is told to end does so in time, though a thread of it hangs for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

HANGING = """
import threading, time
from luceasync.server.serve import exit_process_after
threading.Thread(target=time.sleep, args=[3600]).start()
exit_process_after({seconds})
"""


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_process():
    code = HANGING.format(seconds=0.2)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "told to end 0.2 s ago" in done.stderr


@pytest.mark.slow
def test_a_process_that_ends_by_itself_is_not_waited_for():
    code = "from luceasync.server.serve import exit_process_after; exit_process_after(3600)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0
