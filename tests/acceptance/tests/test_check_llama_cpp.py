"""What a comparison with llama.cpp is made of; llama.cpp itself is not here."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest

from luceasync.models.files import read_spec
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance.check_llama_cpp import Answer, compared
from tests.acceptance.quantised.backends import open_file
from tests.acceptance.quantised.files import write_plain
from tests.acceptance.quantised.texts import nfc_texts
from tests.gguf.tiny_files import K_MIX, Tiny, write

pytestmark = pytest.mark.slow
IDS = [5, 7, 11]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(Tiny(family="qwen3_5", types=K_MIX), tmp_path_factory.mktemp("tiny"))[0]


def test_texts_are_normal_and_always_the_same() -> None:
    texts = nfc_texts(200)
    assert texts == nfc_texts(200) and len(set(texts)) > 190
    assert all(unicodedata.is_normalized("NFC", text) for text in texts)
    assert any("\u0400" <= letter < "\u0500" for text in texts for letter in text)


def test_a_plain_file_has_the_same_numbers_and_words(path: Path, tmp_path: Path) -> None:
    plain = write_plain(path, tmp_path / "plain.gguf")
    first, second = gguf.GGUFReader(path), gguf.GGUFReader(plain)
    assert [tensor.name for tensor in first.tensors] == [tensor.name for tensor in second.tensors]
    for stored, written in zip(first.tensors, second.tensors, strict=True):
        assert written.tensor_type == gguf.GGMLQuantizationType.F32
        numbers = gguf.dequantize(stored.data, stored.tensor_type)
        assert np.array_equal(numbers.reshape(-1), written.data.reshape(-1))
    assert read_spec(plain) == read_spec(path)
    assert Tokenizer.load(plain).encode("to be 12") == Tokenizer.load(path).encode("to be 12")


def test_what_is_alike_is_counted_and_what_parts_is_told(path: Path) -> None:
    """Its own answer, in which another token is made the likeliest at one place."""
    backend, tokenizer = open_file(path, 64, "fp32"), Tokenizer.load(path)
    logits, theirs = backend.prefill(0, 0, IDS, project=True), []
    for position in range(len(IDS), len(IDS) + 4):
        assert logits is not None
        row = logits.flatten().numpy().copy()
        if len(theirs) == 2:
            least = row.min()
            row[row.argmin()] = row.max() + 1
        theirs.append(row)
        logits = backend.decode([0], [position], [int(row.argmax())]).whole()
    answer = compared(backend, IDS, theirs, tokenizer)
    backend.close()
    assert isinstance(answer, Answer)
    assert (answer.num_tokens, answer.num_alike, len(answer.parted)) == (4, 3, 1)
    assert answer.parted[0].startswith("2: ") and answer.largest > 1
    row = theirs[2]  # its likeliest token is the least likely one here
    assert answer.widest == pytest.approx(float(row.max() - 1 - least), abs=1e-4)
