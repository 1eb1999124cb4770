"""The model as a Hugging Face directory: tokenizer, chat template, configuration, weights.

Owns the special tokens and every file that a loader reads. Independent of training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.demo.network import Network, NetworkConfig

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
# Single tokens like the control tokens, but part of the visible text.
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MAX_POSITION_EMBEDDINGS = 4096

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}
    {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role in ('system', 'developer') -%}
{%- if has_system or tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if has_system -%}{{- text_of(messages[0].content) -}}{%- endif -%}
  {%- if has_system and tools -%}{{- '\\n\\n' -}}{%- endif -%}
  {%- if tools -%}
    {{- '# Tools\\n\\nThese functions may be called:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + text_of(message.content) -}}
    {{- '\\n</tool_response><|im_end|>\\n' -}}
  {%- elif not (loop.first and has_system) -%}
    {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {%- if call.function.arguments is string -%}{{- call.function.arguments -}}
      {%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over `texts`; the special tokens take the first ids."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*CONTROL_TOKENS, *TEXT_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    written = json.loads(bpe.to_str())
    for token in written["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(written))


def export(network: Network, tokenizer: Tokenizer, out: Path) -> None:
    """Write the directory; weights in bfloat16, under Hugging Face's names."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", model_config(network.config, tokenizer))
    write_json(out / "generation_config.json", _generation_config(tokenizer))
    write_json(out / "tokenizer_config.json", _tokenizer_config())


def model_config(config: NetworkConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json, as read by transformers' Qwen3_5TextConfig."""
    kinds = {True: "full_attention", False: "linear_attention"}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": [kinds[config.is_attention(i)] for i in range(config.num_layers)],
        "full_attention_interval": config.attention_interval,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_key_head_dim": config.linear_head_dim,
        "linear_value_head_dim": config.linear_head_dim,
        "linear_conv_kernel_dim": config.conv_kernel,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_fraction,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    return {
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), end_of_text],
        "pad_token_id": end_of_text,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
