"""The weight files of a directory are those of its index, and none outside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luceasync.errors import ModelError
from luceasync.models.formats.safetensors import weight_files

INDEX = "model.safetensors.index.json"


def write_index(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_each_file_of_the_index_is_there_once(tmp_path: Path):
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]


def test_a_directory_without_weights_says_what_is_looked_for(tmp_path: Path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*\.index\.json"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", 7, None])
def test_an_index_stays_inside_its_directory(tmp_path: Path, name: object):
    write_index(tmp_path, {"a": name})
    with pytest.raises(ModelError, match="is not a file name in this directory") as caught:
        weight_files(tmp_path)
    assert INDEX in str(caught.value) and repr(name) in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match="not an index of weight files"):
        weight_files(tmp_path)
