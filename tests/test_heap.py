"""What is loaded is not looked through again and again."""

import gc

from luceasync.process_memory import freeze_heap


def test_a_frozen_heap_is_left_out_of_collections():
    kept = [[]]
    freeze_heap()
    try:
        assert gc.get_freeze_count() > 0
        assert not any(found is kept for found in gc.get_objects())
    finally:
        gc.unfreeze()
