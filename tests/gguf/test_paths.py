"""A path means a GGUF file, all parts of one, or the only one of a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from luceasync.errors import ModelError
from luceasync.gguf.model import read_model
from luceasync.gguf.paths import gguf_at, parts_of
from tests.gguf.files import header, qwen3_keys, qwen3_tensors, save

PARTS = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def write_parts(folder: Path, *, numbers=(0, 1, 2), counts=(3, 3, 3), total: int = 24) -> Path:
    """A model in three parts; the first has the metadata."""
    tensors = list(qwen3_tensors().items())
    shares = [dict(tensors[:9]), dict(tensors[9:18]), dict(tensors[18:])]
    for name, share, number, count in zip(PARTS, shares, numbers, counts, strict=True):
        keys = qwen3_keys() if name == PARTS[0] else {}
        keys |= {"split.no": number, "split.count": count, "split.tensors.count": total}
        save(folder / name, header(keys, share), share)
    return folder / PARTS[0]


def test_a_directory_with_one_file_means_that_file(tmp_path: Path):
    assert gguf_at(tmp_path) is None
    path = tmp_path / "m.GGUF"
    path.touch()
    assert gguf_at(tmp_path) == path == gguf_at(path)


def test_a_directory_with_several_models_is_refused(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"there are 2 GGUF files \(a.gguf, b.gguf\); name one"):
        gguf_at(tmp_path)


def test_safetensors_take_precedence(tmp_path: Path):
    for name in ("a.gguf", "model.safetensors"):
        (tmp_path / name).touch()
    assert gguf_at(tmp_path) is None


@pytest.mark.parametrize("named", [*PARTS, "."])
def test_any_part_stands_for_all(tmp_path: Path, named: str):
    write_parts(tmp_path)
    path = gguf_at(tmp_path / named)
    assert path is not None
    model = read_model(path)
    assert [part.name for part in model.paths] == PARTS
    assert model.tensors.keys() == qwen3_tensors().keys()
    assert model.tensors["blk.1.ffn_down.weight"][0].name == PARTS[2]


def test_a_part_that_is_missing_is_named(tmp_path: Path):
    path = write_parts(tmp_path)
    (tmp_path / PARTS[1]).unlink()
    with pytest.raises(ModelError, match=f"{PARTS[1]}: part 2 of 3 does not exist"):
        parts_of(path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"numbers": (0, 2, 1)}, "split.no = 2; expected 1"),
        ({"counts": (3, 3, 4)}, "a model of 4 parts, but the file name says 3"),
        ({"total": 25}, "its parts have 24 tensors; expected 25"),
    ],
)
def test_parts_that_disagree_are_refused(tmp_path: Path, wrong, words: str):
    with pytest.raises(ModelError, match=words):
        read_model(write_parts(tmp_path, **wrong))


def test_a_part_without_the_others_is_refused(tmp_path: Path):
    path = write_parts(tmp_path).rename(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="a model of 3 parts, but the file name says 1"):
        read_model(path)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path):
    path = write_parts(tmp_path)
    first = qwen3_tensors()
    keys = {"split.no": 2, "split.count": 3}
    share = {"token_embd.weight": first["token_embd.weight"]}
    save(tmp_path / PARTS[2], header(keys, share), share)
    with pytest.raises(ModelError, match=r"'token_embd.weight' is in two parts"):
        read_model(path)


def test_a_name_that_claims_very_many_parts_costs_nothing(tmp_path: Path):
    path = tmp_path / "m-00001-of-99999.gguf"
    path.touch()
    with pytest.raises(ModelError, match="part 2 of 99999 does not exist"):
        parts_of(path)
