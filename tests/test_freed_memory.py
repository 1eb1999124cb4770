"""What was freed goes back to the system, where the C library can be asked for that."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

from luceasync.freed_memory import give_back_freed_memory


def test_the_c_library_is_asked_to_let_go_of_all(monkeypatch):
    kept: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=kept.append))
    give_back_freed_memory()
    assert kept == [0]


def test_a_c_library_without_a_word_for_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    give_back_freed_memory()
