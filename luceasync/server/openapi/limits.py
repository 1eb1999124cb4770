"""Ranges of fields that are checked where they are read, for the document: by the field's name.

Owns what the document says of them: the widest range that any API takes. Whoever changes a range
there changes it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIMITS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "n": {"minimum": 1, "maximum": 16},
    "max_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "max_completion_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "max_output_tokens": {"minimum": 1, "maximum": 2**31 - 1},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "prompt_cache_key": {"maxLength": 64},
    "priority": {"minimum": -1000, "maximum": 1000},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "thinking_budget": {"minimum": 0, "maximum": 2**31 - 1},
    "thinking_token_budget": {"minimum": 0, "maximum": 2**31 - 1},
    "messages": {"minItems": 1, "maxItems": 8192},
}


def limited(components: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of bodies with the ranges of their fields."""
    return {
        name: _with_limits(schema) if name.endswith("Body") else schema
        for name, schema in components.items()
    }


def _with_limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: {**field, **LIMITS[name]} if name in LIMITS else field
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": fields} if fields else dict(schema)
