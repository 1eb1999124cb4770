"""A value without quotes gets the type in the tool's schema."""

from __future__ import annotations

from typing import Any

import pytest

from luceasync.text.answer.argument_types import ToolSchemas


def value(schema: Any, text: str, root: dict[str, Any] | None = None) -> Any:
    tools = ToolSchemas({"f": {"properties": {"a": schema}, **(root or {})}})
    return tools.value("f", "a", text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "12.5", "12.5"),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "1e-3", 0.001),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "object"}, '{"b": 1}', {"b": 1}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/x"}, "4", 4),
        ({"$ref": "#/$defs/missing"}, "4", "4"),
        ({"$ref": "https://example.com/x"}, "4", "4"),
        ({}, "4", "4"),
        (True, "4", "4"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_values(schema: Any, text: str, expected: Any) -> None:
    found = value(schema, text, {"$defs": {"x": {"type": "integer"}}})
    assert found == expected and type(found) is type(expected)


def test_a_circular_schema_allows_any_type() -> None:
    assert value({"$ref": "#/properties/a"}, "4") == "4"


def test_schemas_with_many_references_are_visited_once() -> None:
    many = {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/b"}] * 500}
    root = {"properties": {"a": many, "b": many, "c": {"anyOf": [many, {"type": "integer"}]}}}
    assert ToolSchemas({"f": root}).value("f", "c", "4") == 4


def test_unknown_tools_and_arguments_are_strings() -> None:
    assert ToolSchemas().value("f", "a", "4") == "4"
    assert ToolSchemas({"f": {"properties": {}}}).value("f", "a", "4") == "4"
