"""Small real tokenizers, trained here: one byte-level, others with metaspaces and byte fallback."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from luceasync.text.tokenizer import Tokenizer

LINES = [
    "the cat sat on the mat, and the dog ran to the cat",
    "Hello world! Hello there. What is os.path.join for?",
    "caf\u00e9 na\u00efve \u4f60\u597d\u4e16\u754c \U0001f600 e\u0301 don't  two  spaces\n\n",
] * 4
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CHATML_TOKENS,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens(["<think>", "\u65e5\u672c"])
    return backend


def train_pieces(decoder: Any, *, byte_fallback: bool) -> tokenizers.Tokenizer:
    """A metaspace BPE of ASCII characters; all others are bytes or unknown."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    ascii_lines = [line.encode("ascii", "ignore").decode() for line in LINES]
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator(ascii_lines, trainer)
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    tokens += sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocab = {token: i for i, token in enumerate(["<unk>", *tokens])}
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    model = models.BPE(vocab, merges, byte_fallback=byte_fallback, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def fallback_decoder(strip: int = 1) -> Any:
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", strip, 0)] if strip else [])])


BACKENDS = {
    "byte-level": train_byte_level,
    "fallback": lambda: train_pieces(fallback_decoder(), byte_fallback=True),
    "fallback-unstripped": lambda: train_pieces(fallback_decoder(strip=0), byte_fallback=True),
    "metaspace": lambda: train_pieces(decoders.Metaspace(), byte_fallback=False),
    "metaspace-never": lambda: train_pieces(
        decoders.Metaspace(prepend_scheme="never"), byte_fallback=False
    ),
}


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(train_byte_level().to_str())


@pytest.fixture(scope="session")
def fallback() -> Tokenizer:
    return Tokenizer(BACKENDS["fallback"]().to_str())


@pytest.fixture(scope="session", params=BACKENDS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BACKENDS[request.param]().to_str())


@pytest.fixture
def model_dir(tmp_path):
    """A directory with a byte-level tokenizer.json and nothing else."""
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
