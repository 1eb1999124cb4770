"""What separates values is counted outside of strings only, and as JSON understands strings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luceasync.server import fields
from luceasync.server.fields import has_too_many_values

TEXTS = st.text(alphabet=',[{"\\a\N{SNOWMAN}', max_size=8)
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


def num_separators(value: Any) -> int:
    """Commas between values, and brackets that open."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(num_separators, inner))


@given(JSON)
def test_just_the_values_count(value):
    body = json.dumps(value, ensure_ascii=False).encode()
    num = num_separators(value)
    assert not has_too_many_values(body, num)
    # Strings without values around them may make it seem more, but never fewer.
    assert num == 0 or has_too_many_values(body, num - 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON, st.integers(2, 9))
def test_it_does_not_matter_where_a_body_is_cut(monkeypatch, value, piece_bytes):
    monkeypatch.setattr(fields, "SCAN_BYTES", piece_bytes)
    test_just_the_values_count.hypothesis.inner_test(value)


@pytest.mark.parametrize("text", [b"", b'"', b"\\", b'"\\', b"[" * 9, b'"' * 9, b'"\\"' * 9])
def test_what_is_no_json_is_counted_too(text):
    assert has_too_many_values(text, 3) in (False, True)


def test_text_is_not_taken_for_values():
    text = json.dumps({"content": ",[{" * 1000}).encode()
    assert not has_too_many_values(text, 1)
