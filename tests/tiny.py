"""Tiny random models in Hugging Face directories, as transformers writes them, with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

FAMILIES = ("qwen3", "qwen3_5")
VOCAB_SIZE = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "initializer_range": 0.1,  # logits that differ clearly: near-ties would hide mistakes
}


def build(
    family: str,
    num_layers: int = 4,
    *,
    tied: bool = False,
    seed: int = 0,
    kinds: Sequence[str] = ("linear_attention",) * 3 + ("full_attention",),
) -> PreTrainedModel:
    """The model as transformers runs it, float32. Of layers that are of several kinds these come
    again and again.
    """
    torch.manual_seed(seed)
    common = COMMON | {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}
    if family == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(Qwen3Config(**common)).eval()
    if family == "qwen2":
        from transformers import Qwen2Config, Qwen2ForCausalLM

        model = Qwen2ForCausalLM(Qwen2Config(**common)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        return model
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **common,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=[kinds[layer % len(kinds)] for layer in range(num_layers)],
        rope_parameters={
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "rope_type": "default",
        },
    )
    return Qwen3_5ForCausalLM(config).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write the model, a byte-level tokenizer and a ChatML template."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["to be or not to be, that is the question"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


MASK_TOKEN = 3
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": 8,
    "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1, 2]},
}


# What DFlash2 adds to a drafter's config.json.
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        **DRAFT["dflash_config"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
        "final_logit_softcapping": 1.0,
        "output_multiplier": 2.0,
    },
}


def draft_config(**fields: Any) -> dict[str, Any]:
    """config.json of a tiny drafter for a target of four layers; `fields` replace or add."""
    return DRAFT | fields


def save_draft(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a drafter with random float32 weights, as published ones are written."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 2 * shape[-1] ** -0.5
        for name, shape in _draft_shapes(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _draft_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    num_taps = len(config["dflash_config"]["target_layer_ids"])
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    own = {}
    if "DFlash2DraftModel" in config["architectures"]:
        second = config["dflash_config"]
        taps, rank = second["conv_kernel_size"], second["selector_rank"]
        for half in ("attention", "mlp"):
            layer[f"{half}_conv.base_kernel"] = (2, taps, hidden)
            num_rows = 2 * taps * hidden // second["conv_group_size"]
            layer[f"{half}_conv.kernel_projection.weight"] = (num_rows, hidden)
        own["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for kind in ("predecessor", "successor"):
            own[f"candidate_selector.{kind}_codebook"] = (config["vocab_size"], rank)
    if "DFlashLagunaForCausalLM" in config["architectures"]:
        rows = query if config.get("gating") == "per-element" else config["num_attention_heads"]
        layer["self_attn.g_proj.weight"] = (rows, hidden)
        own = {f"aux_hidden_norms.{tap}.weight": (hidden,) for tap in range(num_taps)}
    ends = own | {
        "fc.weight": (hidden, num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layers = range(config["num_hidden_layers"])
    return ends | {f"layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}
