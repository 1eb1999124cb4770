"""What may be written into a ring of features, and in which words the rest is refused."""

import pytest
import torch

from luceasync.speculation.dflash.features import FeatureSpec, check_rows, check_taps

SPEC = FeatureSpec(taps=(1, 4), hidden_size=3)


def _taps(*shape: int, count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        (_taps(1, 4, 3, count=1), r"1 taps came; layers \[1, 4\] are expected"),
        (_taps(1, 4, 2), r"\(1, 4, 2\); torch.float32 \(1, 4, 3\) is expected"),
        ([*_taps(1, 4, 3, count=1), *_taps(1, 5, 3, count=1)], "tap 1 is"),
        (_taps(1, 4, 3, dtype=torch.int32), "tap 0: torch.int32; one of bfloat16"),
        (_taps(4, 3), "tap 0 is"),
    ],
)
def test_taps_that_cannot_be_are_refused(taps, words) -> None:
    with pytest.raises(ValueError, match=words):
        check_taps(SPEC, taps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"begins": [-1]}, "lane 1 begins at position -1"),
        ({"lanes": [3]}, "lane 3: 0 to 2 are there"),
        ({"paths": [range(5)]}, "takes rows 0 to 4 of taps with 4"),
        ({"paths": [[-1]]}, "takes rows -1 to -1"),
        ({"paths": [range(2), range(2)]}, "1 lanes, 1 begins and 2 paths for 1 entries"),
        (
            {"num_entries": 2, "lanes": [1, 1], "begins": [0, 4], "paths": [[0], [0]]},
            "each may come once",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused(change, words) -> None:
    arguments = {"num_entries": 1, "lanes": [1], "begins": [0], "paths": [[0]]} | change
    with pytest.raises(ValueError, match=words):
        check_rows(3, num_rows=4, **arguments)


def test_padding_may_stand_anywhere() -> None:
    check_rows(3, 2, 4, [-1, -1], [-5, 0], [range(9), ()])
