"""The disk of a server that has none."""

from __future__ import annotations

import pytest

from luceasync.keeping.shelf import NoShelf, Order


def test_what_was_never_written_is_never_read():
    with pytest.raises(AssertionError, match="nothing was ever written"):
        NoShelf().read([Order(b"k", with_end=True)])


def test_there_is_nothing_to_remove_touch_or_set_aside():
    shelf = NoShelf()
    shelf.remove([b"k"])
    shelf.touch([b"k"])
    shelf.quarantine(b"k")
