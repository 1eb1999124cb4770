"""Model families, a file each, and the table of them by what config.json calls `model_type`."""

from luceasync.models.families import qwen3, qwen3_5
from luceasync.models.families.family import Family
from luceasync.models.spec import ModelSpec

FAMILIES: dict[str, Family] = {
    "qwen3": qwen3.FAMILY,
    "qwen3_5": qwen3_5.WRAPPED,
    "qwen3_5_text": qwen3_5.FAMILY,
}


def family_of(spec: ModelSpec) -> Family:
    """The family that has parsed the spec."""
    return next(family for family in FAMILIES.values() if family.name == spec.family)
