"""Text is filled in between two others, by models whose tokenizers have tokens for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luceasync.errors import RequestError
from luceasync.request import InfillPrompt, Request, Sampling, TokenPrompt
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.engines import running

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("qwen3"), tmp_path_factory.mktemp("plain"))


def with_tokens(plain_dir: Path, folder: Path, names: Sequence[str]) -> tuple[Path, list[int]]:
    """The model with these special tokens, and their ids."""
    model_dir = Path(shutil.copytree(plain_dir, folder / "model"))
    path = model_dir / "tokenizer.json"
    definition = json.loads(path.read_text())
    first = 1 + max(definition["model"]["vocab"].values())
    like = definition["added_tokens"][0]
    new = [like | {"id": first + i, "content": name} for i, name in enumerate(names)]
    definition["added_tokens"] += new
    path.write_text(json.dumps(definition))
    return model_dir, [token["id"] for token in new]


async def written(engine: Any, prompt: Any, **fields: Any) -> tuple[list[int], str]:
    """Token ids of an answer, and why it ended."""
    stream = await engine.open(Request(prompt, Sampling(temperature=0, **fields), max_tokens=8))
    deltas = [delta async for delta in stream]
    return [i for delta in deltas for i in delta.token_ids], deltas[-1].finish.reason


@pytest.mark.parametrize("names", [QWEN, STARCODER])
async def test_the_parts_are_between_the_models_tokens(
    plain_dir: Path, tmp_path: Path, names: Sequence[str]
):
    model_dir, (before, after, middle, end) = with_tokens(plain_dir, tmp_path, names)
    tokenizer = Tokenizer.load(model_dir)
    texts = f"to be {names[0]}", "the question"  # a special token in a text is ordinary text
    parts = [tokenizer.encode(text, special=False) for text in texts]
    ids = (before, *parts[0], after, *parts[1], middle)
    assert before not in parts[0]
    async with running(model_dir) as engine:
        expected, _ = await written(engine, TokenPrompt(ids))
        assert (await written(engine, InfillPrompt(*texts)))[0] == expected
        ends = {end: 100.0}
        assert await written(engine, InfillPrompt(*texts), logit_bias=ends) == ([end], "stop")
        assert (await written(engine, TokenPrompt(ids), logit_bias=ends))[1] == "length"


async def test_other_models_only_continue_text(plain_dir: Path):
    async with running(plain_dir) as engine:
        with pytest.raises(RequestError, match="suffix: the model only continues text") as caught:
            await written(engine, InfillPrompt("a", "b"))
    assert caught.value.param == "suffix"
