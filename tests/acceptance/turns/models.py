"""The models of the conversations: tiny random ones, and the bundled one.

All have the bundled model's tokenizer, so that what opens an answer is as short as in real models.
Owns their folders.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from luceasync.config import BUNDLED_DRAFT_DIR, BUNDLED_MODEL_DIR
from luceasync.kv.state import num_bytes
from luceasync.models.files import read_spec
from luceasync.models.precision import Precision

ModelName = Literal["attention", "hybrid", "windows", "laguna", "bundled"]
TemplateName = Literal["qwen3", "qwen3.5", "whole"]
MODELS: tuple[ModelName, ...] = ("attention", "hybrid", "windows", "laguna", "bundled")
TEMPLATES: tuple[TemplateName, ...] = ("qwen3.5", "qwen3", "whole")
MAX_CTX_TOKENS = 16384
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# A row is 4 KiB without recurrent layers and 1 KiB with them or windows, a state 51 to 53 KiB.
COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_CTX_TOKENS,
    "eos_token_id": 2,
    "initializer_range": 0.1,  # logits that differ clearly: near-ties would hide mistakes
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model in a folder. `row_bytes`: of a token; `state_bytes`: of its recurrent layers and
    windows; `tolerance`: allowed difference of log-probabilities to a cold server's.
    """

    model_dir: Path
    draft_dir: Path
    row_bytes: int
    state_bytes: int
    letter_bias: float
    tolerance: float


def make_model(name: ModelName, template: TemplateName, folder: Path) -> Model:
    """The model with that template, in its own folder; weights are made, or linked."""
    model_dir = folder / "model"
    model_dir.mkdir(parents=True)
    for file in TOKENIZER_FILES:
        shutil.copy(BUNDLED_MODEL_DIR / file, model_dir)
    if template != "whole":  # the bundled model's own leaves nothing out
        source = Path(__file__).parent / f"{template}.jinja"
        shutil.copy(source, model_dir / "chat_template.jinja")
    if name == "bundled":
        _link_bundled(model_dir)
        draft_dir = BUNDLED_DRAFT_DIR
    else:
        _make_random(name, model_dir)
        draft_dir = _random_draft(folder / "draft")
    precision = Precision.of("fp32")
    mixers = read_spec(model_dir).mixers
    return Model(
        model_dir,
        draft_dir,
        row_bytes=sum(num_bytes(mixer.rows, precision) for mixer in mixers),
        state_bytes=sum(num_bytes(mixer.end, precision) for mixer in mixers),
        letter_bias=60.0 if name == "bundled" else 16.0,
        tolerance=1e-3 if name == "bundled" else 2e-5,
    )


def _link_bundled(model_dir: Path) -> None:
    """Link the bundled model's weights, with a configuration for a longer context."""
    for path in BUNDLED_MODEL_DIR.glob("*.safetensors"):
        (model_dir / path.name).symlink_to(path)
    config = json.loads((BUNDLED_MODEL_DIR / "config.json").read_text())
    config["max_position_embeddings"] = MAX_CTX_TOKENS
    (model_dir / "config.json").write_text(json.dumps(config))


def _make_random(name: ModelName, model_dir: Path) -> None:
    """Write random weights, always the same, as transformers writes them."""
    import torch
    import transformers
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LagunaConfig,
        LagunaForCausalLM,
        PreTrainedModel,
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model: PreTrainedModel
    if name == "attention":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON))
    elif name == "windows":
        # Three layers of windows, which do not divide a chunk, and one without.
        layers = {"sliding_window": 17, "sliding_window_pattern": 4, "query_pre_attn_scalar": 64}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **layers))
    elif name == "laguna":
        kinds = ["full_attention"] + ["sliding_attention"] * 3
        # With seed 0 it answers with one letter all the time: wherever an answer is cut, more of it
        # seems to be known than any end was saved for.
        torch.manual_seed(1)
        experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
        experts |= {"shared_expert_intermediate_size": 32}
        laguna = LagunaConfig(**COMMON, **experts, layer_types=kinds, sliding_window=17)
        model = LagunaForCausalLM(laguna)
    else:
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        config = Qwen3_5TextConfig(
            **COMMON,
            layer_types=kinds,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            rope_parameters={
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "rope_type": "default",
            },
        )
        model = Qwen3_5ForCausalLM(config)
    model.save_pretrained(model_dir)


def _random_draft(folder: Path) -> Path:
    """Write a drafter that proposes anything."""
    from tests import tiny

    return tiny.save_draft(folder, tiny.draft_config(vocab_size=COMMON["vocab_size"]))
