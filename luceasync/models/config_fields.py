"""Typed access to the fields of a config.json. Pure; knows no family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from luceasync.errors import ModelError


class Fields:
    """Typed access to a config; a missing or misfitting field is a ModelError that names it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} = {value!r}: a positive integer is expected")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if not _is_positive_number(value):
            raise ModelError(f"{name} = {value!r}: a positive number is expected")
        return float(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{name} = {value!r}: a JSON object is expected")
        return value

    def must_be(self, name: str, expected: object) -> None:
        value = self.config.get(name)
        value = expected if value is None else value
        if value != expected:
            raise ModelError(f"{name} = {value!r} is not supported; expected {expected!r}")

    def eos_ids(self) -> frozenset[int]:
        value = self.config.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int for i in ids):
            raise ModelError(f"eos_token_id = {value!r}: an integer or a list of them is expected")
        return frozenset(ids)

    def rope(self) -> Mapping[str, Any]:
        """`rope_parameters` of today's configs, or the older fields of the top level. Where both
        are there, transformers follows `rope_scaling`.
        """
        rope = dict(self.mapping("rope_scaling") or self.mapping("rope_parameters"))
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "mrope"):
            raise ModelError(f"rope_type {rope_type!r} is not supported; expected 'default'")
        for name in ("rope_theta", "partial_rotary_factor"):
            if self.config.get(name) is not None:
                rope.setdefault(name, self.config[name])
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope and not _is_positive_number(rope[name]):
                raise ModelError(f"{name} = {rope[name]!r}: a positive number is expected")
        return rope


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0
