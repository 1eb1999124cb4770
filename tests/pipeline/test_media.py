"""Directories of models that see and hear, as transformers saves them: their text parts are read,
and are what transformers runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from luceasync.config import Config, ModelConfig
from luceasync.pipeline.report import plan_report
from tests import tiny

PROMPT = [(7 * i) % 500 + 3 for i in range(70)]
TEXT = tiny.COMMON | {"num_hidden_layers": 2, "sliding_window": 24}
KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
INPUTS = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": tiny.VOCAB_SIZE}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = SMALL | {"intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2}
# By `model_type`: the fields of a config.
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"tie_word_embeddings": True},
        "vision_config": SMALL | {"intermediate_size": 32, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": TEXT | KINDS | INPUTS | {"global_head_dim": 32},
        "vision_config": VISION | {"position_embedding_size": 16},
        "audio_config": SMALL | {"output_proj_dims": 32},
    },
    "gemma4_unified": {"text_config": TEXT | KINDS | {"global_head_dim": 32}},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_the_text_part_is_the_peers(model_type: str, tmp_path: Path, make_backend) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    peer = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    peer.save_pretrained(tmp_path)
    plan_report(Config(model=ModelConfig(tmp_path)))  # finds no tensor that nothing uses
    logits = make_backend(tmp_path).prefill(0, 0, PROMPT, project=True).flatten()
    with torch.inference_mode():
        expected = peer(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
