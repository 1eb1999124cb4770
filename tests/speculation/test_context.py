"""Where context lies and how much of it is read."""

import pytest

from luceasync.speculation.dflash.context import reach_for


@pytest.mark.parametrize(
    ("position", "reach"), [(0, 256), (256, 256), (257, 384), (385, 512), (513, 768), (5000, 6144)]
)
def test_few_reaches_come_up(position, reach):
    assert reach_for(position) == reach
