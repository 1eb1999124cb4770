"""A disk is degraded until each kind of work that failed has succeeded."""

from luceasync.disk_cache.outcomes import Faults


def test_success_of_one_kind_of_work_clears_no_other_fault() -> None:
    faults = Faults()
    assert str(faults) == ""
    faults.tell("read", "it does not read")
    faults.tell("write")
    assert str(faults) == "it does not read"
    faults.tell("write", "it is full")
    assert str(faults) == "it does not read; it is full"
    faults.tell("read")
    assert str(faults) == "it is full"
