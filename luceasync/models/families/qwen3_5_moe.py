"""Qwen3.5 with experts: its hybrid layers, with routed experts and one expert that all rows
share."""

from __future__ import annotations

from dataclasses import replace

from luceasync.models.families import qwen3_5
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.families.qwen3_moe import parse_experts
from luceasync.models.feed_forward.experts import ExpertsSpec
from luceasync.models.spec import ModelSpec

DEFAULTS = {
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a text model's config. Raises ModelError."""
    fields = fields.with_defaults(DEFAULTS)
    return qwen3_5.parse_text(fields, "qwen3_5_moe", _experts(fields))


def parse_wrapped(fields: ConfigFields) -> ModelSpec:
    """The spec of the text part of a vision model. Raises ModelError."""
    spec = parse(qwen3_5.text_of(fields))
    return replace(spec, prefix=qwen3_5.WRAPPED_PREFIX)


def parse_gguf(fields: ConfigFields) -> ModelSpec:
    """The spec of a GGUF file. Raises ModelError."""
    return qwen3_5.as_in_gguf(parse(fields))


def _experts(fields: ConfigFields) -> ExpertsSpec:
    return replace(
        parse_experts(fields, is_normalised=True),
        shared_size=fields.positive("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )


CLASSES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
FAMILY = Family("qwen3_5_moe", parse, CLASSES)
GGUF = Family("qwen3_5_moe", parse_gguf, CLASSES)
WRAPPED = Family("qwen3_5_moe", parse_wrapped, CLASSES)
