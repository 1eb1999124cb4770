"""One server keeps the budget of a shared directory; another takes over once that one is gone."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.keeper import LEASE, LEASE_S, KeeperLease


class OtherHost(FileSystem):
    host = "0b" * 8


@pytest.fixture
def ours(tmp_path: Path) -> KeeperLease:
    return KeeperLease(FileSystem(), tmp_path)


@pytest.fixture
def theirs(tmp_path: Path) -> KeeperLease:
    return KeeperLease(OtherHost(), tmp_path)


def age(root: Path, age_s: float) -> None:
    """Have the lease last renewed so long ago."""
    os.utime(root / LEASE, (time.time() - age_s,) * 2)


def test_the_first_keeps_the_budget_for_as_long_as_it_renews(
    tmp_path: Path, ours: KeeperLease, theirs: KeeperLease
) -> None:
    assert ours.renew()
    assert not theirs.renew()
    age(tmp_path, LEASE_S - 10)
    assert not theirs.renew()
    assert ours.renew()
    assert time.time() - (tmp_path / LEASE).stat().st_mtime < 10


def test_a_lease_that_was_not_renewed_is_taken_over(
    tmp_path: Path, ours: KeeperLease, theirs: KeeperLease
) -> None:
    assert ours.renew()
    age(tmp_path, LEASE_S + 10)
    assert theirs.renew()
    assert not ours.renew()
    assert [path.name for path in tmp_path.iterdir()] == [LEASE]


def test_a_lease_that_is_given_up_is_free_at_once(ours: KeeperLease, theirs: KeeperLease) -> None:
    assert ours.renew()
    theirs.release()  # not its own: it stays
    assert not theirs.renew()
    ours.release()
    assert theirs.renew()


def test_of_many_that_find_an_old_lease_one_takes_it(tmp_path: Path) -> None:
    leases = [KeeperLease(FileSystem(), tmp_path) for _ in range(8)]
    together = threading.Barrier(len(leases))

    def take(lease: KeeperLease) -> bool:
        together.wait(60)
        return lease.renew()

    with ThreadPoolExecutor(len(leases)) as threads:
        for _ in range(20):
            (tmp_path / LEASE).write_bytes(b"gone")
            age(tmp_path, LEASE_S + 10)
            list(threads.map(take, leases))
            assert sum(lease.renew() for lease in leases) == 1
    assert [path.name for path in tmp_path.iterdir()] == [LEASE]
