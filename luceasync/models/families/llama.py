"""Llama and its relatives: attention without head norms, and SwiGLU, in every layer."""

from __future__ import annotations

from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.families.qwen3 import architecture, parse_dense
from luceasync.models.spec import ModelSpec

DEFAULTS = {"max_position_embeddings": 2048}


def parse(fields: ConfigFields) -> ModelSpec:
    """The spec of a config. Raises ModelError."""
    fields.must_be("mlp_bias", False)
    return parse_dense(fields.with_defaults(DEFAULTS), "llama", has_head_norms=False)


FAMILY = Family("llama", parse, ("LlamaForCausalLM",), architecture)
