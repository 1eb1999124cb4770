"""Model families, one or several similar ones per module, and the tables that find them by name."""

from luceasync.models.families import dense, gemma3, gemma4, laguna, qwen3_5, qwen3_5_moe, qwen3_moe
from luceasync.models.families.family import Family
from luceasync.models.spec import ModelSpec

# By `model_type` of config.json.
FAMILIES: dict[str, Family] = {
    **dense.FAMILIES,
    "gemma3": gemma3.WRAPPED,
    "gemma3_text": gemma3.FAMILY,
    **gemma4.FAMILIES,
    "laguna": laguna.FAMILY,
    "qwen3_5": qwen3_5.WRAPPED,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.WRAPPED,
    "qwen3_5_moe_text": qwen3_5_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}

# By `general.architecture` of a GGUF file.
GGUF_FAMILIES: dict[str, Family] = {
    **{name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "smollm3")},
    "gemma3": gemma3.GGUF,
    "gemma4": gemma4.FAMILIES["gemma4_text"],
    "laguna": laguna.FAMILY,
    "qwen35": qwen3_5.GGUF,
    "qwen35moe": qwen3_5_moe.GGUF,
    "qwen3moe": qwen3_moe.FAMILY,
}


def family_of(spec: ModelSpec) -> Family:
    """The family that parsed the spec."""
    return next(family for family in FAMILIES.values() if family.name == spec.family)
