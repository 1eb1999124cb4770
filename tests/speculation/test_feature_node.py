"""Features in a snapshot are taken up only where every word about them fits."""

import pytest
import torch

from luceasync.errors import SnapshotMismatch
from luceasync.speculation.dflash.feature_contents import DATA, META, FeatureRows, decode, encode
from luceasync.speculation.dflash.features import FeatureSpec

SPEC = FeatureSpec(taps=(1, 4), hidden_size=3)
ROWS = torch.arange(24.0).view(4, 6)


def tensors(**change: torch.Tensor) -> dict[str, torch.Tensor]:
    return encode(SPEC, FeatureRows(6, ROWS)) | change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_encoded_is_decoded(dtype) -> None:
    found = decode(SPEC, encode(SPEC, FeatureRows(6, ROWS.to(dtype))), begin=2, end=10)
    assert found.begin == 6
    assert torch.equal(found.rows, ROWS.to(dtype))


def test_the_form_in_the_file() -> None:
    assert tensors()["dflash_feature_meta"].tolist() == [1, 6, 10, 3, 1, 4]
    assert tensors()["dflash_feature_meta"].dtype == torch.int64
    assert tensors()["dflash_feature_data"] is ROWS


def test_a_node_may_have_none() -> None:
    assert decode(SPEC, {"tokens": torch.zeros(4)}, begin=6, end=10) is None


def meta(*fields: int) -> torch.Tensor:
    return torch.tensor(fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({META: meta(2, 6, 10, 3, 1, 4)}, "schema 2, expected 1"),
        ({META: meta(1, 6, 10, 3, 1, 5)}, r"layers \[1, 5\] of 3.* reads layers \[1, 4\] of 3"),
        ({META: meta(1, 6, 10, 3, 4, 1)}, r"layers \[4, 1\]"),
        ({META: meta(1, 6, 10, 2, 1, 4)}, "of 2 numbers"),
        ({META: meta(1, 5, 10, 3, 1, 4)}, r"node of \[6, 10\)"),
        ({META: meta(1, 6, 9, 3, 1, 4)}, r"features of positions \[6, 9\)"),
        ({META: meta(1, 10, 10, 3, 1, 4)}, r"\[10, 10\)"),
        ({META: meta(1, 7, 10, 3, 1, 4)}, r"float32 \(4, 6\), expected a float tensor \(3, 6\)"),
        ({META: meta(1, 6, 10, 3)}, r"int64 \(4,\)"),
        ({META: torch.zeros(6)}, r"float32 \(6,\)"),
        ({META: torch.zeros(1, 6, dtype=torch.int64)}, r"int64 \(1, 6\)"),
        ({DATA: ROWS.long()}, "int64"),
        ({DATA: ROWS[:, :5]}, r"\(4, 5\)"),
    ],
)
def test_others_are_refused_in_words(change, words) -> None:
    with pytest.raises(SnapshotMismatch, match=words):
        decode(SPEC, tensors(**change), begin=6, end=10)


@pytest.mark.parametrize("name", [META, DATA])
def test_the_two_tensors_go_together(name) -> None:
    with pytest.raises(SnapshotMismatch, match=f"{name} came alone"):
        decode(SPEC, {name: tensors()[name]}, begin=6, end=10)


@pytest.mark.parametrize("rows", [ROWS[:0], ROWS[:, :5], ROWS.long(), ROWS[0]])
def test_rows_that_are_not_of_the_spec_are_not_encoded(rows) -> None:
    with pytest.raises(ValueError, match="is expected"):
        encode(SPEC, FeatureRows(0, rows))
