"""Model families, one per module, and the tables that find them by name."""

from luceasync.models.families import llama, qwen3, qwen3_5
from luceasync.models.families.family import Family
from luceasync.models.spec import ModelSpec

# By `model_type` of config.json.
FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5": qwen3_5.WRAPPED,
    "qwen3_5_text": qwen3_5.FAMILY,
}

# By `general.architecture` of a GGUF file.
GGUF_FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen35": qwen3_5.GGUF,
}


def family_of(spec: ModelSpec) -> Family:
    """The family that parsed the spec."""
    return next(family for family in FAMILIES.values() if family.name == spec.family)
