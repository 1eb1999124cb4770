"""A real model with windows from a real GGUF file: Gemma 3 270M in Q4_K_M. Skipped where
`python -m tests.acceptance.fetch_models gemma-3-270m` was not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest
import torch

from luceasync.engine.engine import LocalEngine
from luceasync.models.files import read_spec
from luceasync.request import Request, TextPrompt
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance.fetch_models import MODELS
from tests.acceptance.quantised.backends import open_file
from tests.engines import running, written
from tests.gguf.tiny_files import gguf_name

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

PATH = MODELS["gemma-3-270m"].path
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PATH.exists(), reason=f"{PATH} is not there: see fetch_models"),
]
CODE = Path(__file__).with_name("conftest.py").read_text()  # more than a window of tokens


def as_transformers_runs_it() -> PreTrainedModel:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    spec = read_spec(PATH)
    heads, inner = spec.mixers[0], spec.layers[0].feed_forward.inner_size
    config = Gemma3TextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=inner,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        query_pre_attn_scalar=heads.head_dim,
        sliding_window=512,
    )
    state = {}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(PATH).tensors}
    for name in spec.shapes():
        tensor = stored[gguf_name(name, "gemma3")]
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        state[name] = torch.from_numpy(numbers - 1 if "norm" in name else numbers.copy())
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
    model.model.embed_tokens.embed_scale = torch.tensor(spec.hidden_size**0.5)
    return model.eval()


def test_logits_beyond_a_window_are_those_of_its_dequantised_numbers():
    tokenizer = Tokenizer.load(PATH)
    ids = tokenizer.encode(tokenizer.lead + CODE)[:700]
    with torch.inference_mode():
        expected = as_transformers_runs_it()(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
    backend = open_file(PATH, 1024, "fp32")
    for begin in range(0, len(ids), 256):
        logits = backend.prefill(0, begin, ids[begin : begin + 256], project=True)
    backend.close()
    assert logits is not None
    torch.testing.assert_close(logits.flatten(), expected, rtol=0, atol=2e-3)


async def test_a_text_beyond_a_window_goes_on_after_a_restart(tmp_path: Path):
    """And a longer one that continues it runs no more than what is new."""

    async def said(engine: LocalEngine, text: str) -> tuple[str, int]:
        request = Request(TextPrompt(text), max_tokens=12, ignore_eos=True, keep_prefix=True)
        deltas = [delta async for delta in await engine.open(request)]
        assert deltas[-1].finish is not None
        return "".join(d.text for d in deltas), deltas[-1].finish.usage.cached_tokens

    text = CODE[:3000]
    num_tokens = len(Tokenizer.load(PATH).encode("<bos>" + text))
    async with running(PATH, tmp_path) as engine:
        first = await said(engine, text)
        await written(engine)
    async with running(PATH, tmp_path, shards=3) as engine:
        assert await said(engine, text) == (first[0], num_tokens)
        _, num_cached = await said(engine, text + first[0] + " and more")
    assert first[1] == 0 and num_cached >= num_tokens > 600
