"""A node's metadata survives being written as strings."""

from dataclasses import replace

import pytest

from luceasync.disk_cache.metadata import FIELDS, from_strings, to_strings
from tests.disk_cache.node_files import METADATA


@pytest.mark.parametrize(
    "change",
    [{}, {"generated": False}, {"turn_end": True}, {"begin": 0, "parent": ""}, {"split": (0,)}],
)
def test_metadata_survives_as_strings(change) -> None:
    metadata = replace(METADATA, **change)
    strings = to_strings(metadata)
    assert strings.keys() == FIELDS
    assert from_strings(strings) == metadata
