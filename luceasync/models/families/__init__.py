"""Model families, a file each, and the tables of them by the names that files have for them."""

from luceasync.models.families import llama, qwen3, qwen3_5
from luceasync.models.families.family import Family
from luceasync.models.spec import ModelSpec

# By what config.json calls `model_type`.
FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5": qwen3_5.WRAPPED,
    "qwen3_5_text": qwen3_5.FAMILY,
}

# By what a GGUF file calls `general.architecture`.
GGUF_FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen35": qwen3_5.GGUF,
}


def family_of(spec: ModelSpec) -> Family:
    """The family that has parsed the spec."""
    return next(family for family in FAMILIES.values() if family.name == spec.family)
