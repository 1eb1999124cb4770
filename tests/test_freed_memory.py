"""What was freed goes back to the system, where the C library can be asked for that."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from types import SimpleNamespace

from luceasync.process_memory import (
    LARGE_BLOCK_BYTES,
    give_back_freed_memory,
    keep_large_blocks_apart,
    resident_bytes,
)


def test_the_c_library_is_asked_to_let_go_of_all(monkeypatch):
    kept: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=kept.append))
    give_back_freed_memory()
    assert kept == [0]


def test_a_c_library_without_a_word_for_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    give_back_freed_memory()
    keep_large_blocks_apart()


HOLES = """
import ctypes
import subprocess
import sys
from luceasync.process_memory import keep_large_blocks_apart, resident_bytes

keep_large_blocks_apart()
C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
C.free.argtypes = [ctypes.c_void_p]
C.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def filled(num_bytes):
    block = C.malloc(num_bytes)
    C.memset(block, 1, num_bytes)
    return block

C.free(filled(30 << 20))  # the C library learns from it, if it may
before = resident_bytes()
large = []
for _ in range(20):
    large.append(filled(SIZE))
    filled(1000)  # and stays
for block in large:
    C.free(block)
print(resident_bytes() - before)
"""


def test_large_blocks_leave_no_holes_between_small_ones_that_stay():
    program = HOLES.replace("SIZE", str(2 * LARGE_BLOCK_BYTES))
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=60
    )
    assert int(done.stdout) < 2 * LARGE_BLOCK_BYTES


def test_what_is_resident_is_told():
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # new pages: the C library may have some left
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert resident_bytes() - before > len(block) // 2
