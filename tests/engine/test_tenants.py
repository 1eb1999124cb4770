"""How many tenants are remembered, and how much of what they said."""

from __future__ import annotations

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.engine import tenants as module
from luceasync.engine.tenants import MAX_TENANTS, MAX_TOKENS_HELD, Tenants
from luceasync.text.history import History
from luceasync.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.fixture
def tenants(tokenizer) -> Tenants:
    return Tenants(lambda: History(tokenizer))


def test_a_tenant_is_the_same_as_long_as_it_asks(tenants):
    first = tenants.get("first")
    for i in range(2 * MAX_TENANTS):
        tenants.get(f"other {i}")
        assert tenants.get("first") is first


def test_who_has_not_asked_for_longest_is_forgotten(tenants):
    first = tenants.get("first")
    for i in range(MAX_TENANTS):
        tenants.get(f"other {i}")
    again = tenants.get("first")
    assert again is not first
    assert again.key == first.key  # what is kept for it is found all the same


def test_all_of_them_together_hold_a_bounded_number_of_ids(tenants, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS_HELD", 100)
    for name in ("a", "b", "c"):
        tenants.get(name).history.remember(name, [1] * 40, [2])
    assert len(tenants._tenants) == 3
    tenants.get("c")
    assert list(tenants._tenants) == ["b", "c"]


def test_one_that_asks_alone_is_never_forgotten(tenants, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS_HELD", 10)
    alone = tenants.get("alone")
    alone.history.remember("text", [1] * 40, [2])
    assert tenants.get("alone") is alone


def test_one_history_cannot_take_up_everything(tokenizer):
    assert 4 * History(tokenizer)._max_tokens_held <= MAX_TOKENS_HELD
