"""The disk of a server without a cache directory."""

from __future__ import annotations

import pytest

from luceasync.prefix_cache.disk_orders import NoDisk, ReadOrder


def test_what_was_never_written_is_never_read():
    with pytest.raises(AssertionError, match="nothing was ever written"):
        NoDisk().read([ReadOrder(b"k", with_end=True)])


def test_there_is_nothing_to_remove_touch_or_quarantine():
    disk = NoDisk()
    disk.remove([b"k"])
    disk.touch([b"k"])
    disk.quarantine(b"k")
