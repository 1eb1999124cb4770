"""A path that is not a model directory is refused with advice."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from luceasync.errors import ModelError
from luceasync.models.directory import check_directory, model_name


def words_for(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_directory(path)
    words = str(caught.value)
    assert words.startswith(f"{path}: ")
    assert "\n" not in words
    return words


def test_what_is_not_there_does_not_exist(tmp_path):
    assert "does not exist; expected a Hugging Face model directory" in words_for(tmp_path / "no")


def test_a_name_of_the_hub_is_told_how_it_is_downloaded():
    words = words_for(Path("Qwen/Qwen3-4B"))
    assert "`hf download Qwen/Qwen3-4B --local-dir Qwen3-4B` and serve Qwen3-4B" in words


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("hf.co/Qwen/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
        ("https://huggingface.co/Qwen/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
        ("hf.co/a/b-GGUF:Q4_K_M", "hf download a/b-GGUF --include '*Q4_K_M*' --local-dir b-GGUF"),
        ("qwen3:0.6b", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("llama3.2:3b", "hf download ORGANISATION/NAME --local-dir NAME"),
    ],
)
def test_a_name_of_another_program_is_told_how_it_is_downloaded(name, command):
    assert f"`{command}`" in words_for(Path(name))


@pytest.mark.parametrize("path", ["/models/Qwen3-4B", "models/a/b", "./a/../b", "~/x"])
def test_a_path_is_no_name_of_the_hub(path):
    assert "hf download" not in words_for(Path(path))


def test_a_gguf_file_is_no_directory_and_named_as_what_it_is(tmp_path):
    path = tmp_path / "q4.gguf"
    assert "does not exist" in words_for(path)
    path.touch()
    assert re.search("is a GGUF file; expected .*safetensors", words_for(path))
    assert "no config.json, but GGUF files" in words_for(tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q4_K_M"),
        ("Qwen3.5-27B-Q8_0-00002-of-00003.gguf", "Qwen3.5-27B-Q8_0"),
    ],
)
def test_a_model_is_called_as_its_directory_or_its_file(tmp_path, file, name):
    (tmp_path / file).touch()
    assert model_name(tmp_path / file) == name
    assert model_name(tmp_path) == tmp_path.name


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "x").touch()
    assert "is a file" in words_for(tmp_path / "x")


def test_what_is_no_regular_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a regular file" in words_for(tmp_path / "pipe.gguf")
    assert "no config.json; expected" in words_for(tmp_path)


def test_a_link_to_nothing_says_where_it_leads(tmp_path):
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    assert "is a link to gone.gguf, which does not exist" in words_for(tmp_path / "m.gguf")


def test_a_directory_of_the_hubs_cache_says_where_the_model_is(tmp_path):
    inner = tmp_path / "snapshots" / "0a1b"
    inner.mkdir(parents=True)
    (inner / "config.json").touch()
    assert f"no config.json (there is one in {inner})" in words_for(tmp_path)
    check_directory(inner)


def test_a_path_that_no_system_call_takes_is_refused_too():
    assert "cannot be opened" in words_for(Path("a\0b"))
