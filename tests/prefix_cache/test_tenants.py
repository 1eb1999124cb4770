"""How many tenants are remembered, and how much of what they said."""

from __future__ import annotations

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.prefix_cache import tenants as module
from luceasync.prefix_cache.tenants import MAX_TENANTS, MAX_TOKENS_HELD, Tenants
from luceasync.prefix_tree.node import Node, node_key, pack_tokens, tenant_key
from luceasync.text.history import History
from luceasync.text.prompt import PastCall
from luceasync.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.fixture
def tenants(tokenizer) -> Tenants:
    return Tenants(lambda: History(tokenizer))


def test_a_tenant_is_the_same_object_while_it_sends_requests(tenants):
    first = tenants.get("first")
    for i in range(2 * MAX_TENANTS):
        tenants.get(f"other {i}")
        assert tenants.get("first") is first


def test_the_least_recent_tenant_is_forgotten(tenants):
    first = tenants.get("first")
    for i in range(MAX_TENANTS):
        tenants.get(f"other {i}")
    again = tenants.get("first")
    assert again is not first
    assert again.key == first.key  # its nodes are found all the same


def test_all_histories_together_are_bounded(tenants, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS_HELD", 100)
    for name in ("a", "b", "c"):
        tenants.get(name).history.remember(name, [1] * 40, [2])
    assert len(tenants._tenants) == 3
    tenants.get("c")
    assert list(tenants._tenants) == ["b", "c"]


def test_a_single_tenant_is_never_forgotten(tenants, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS_HELD", 10)
    alone = tenants.get("alone")
    alone.history.remember("text", [1] * 40, [2])
    assert tenants.get("alone") is alone


def test_one_history_cannot_take_all_the_room(tokenizer):
    assert 4 * History(tokenizer)._max_tokens_held <= MAX_TOKENS_HELD


def node_of(tokenizer, name: str, text: str, parent: Node | None = None, **fields) -> Node:
    """A node on disk as the tenant would have left it."""
    tokens = pack_tokens(tokenizer.encode(text))
    above = None if parent is None else parent.key
    disk = frozenset(("disk",))
    return Node(
        key=node_key(tokens, tenant_key(name), above),
        parent=above,
        begin=0 if parent is None else parent.end,
        tokens=tokens,
        tiers=disk,
        num_bytes=1,
        logits_tiers=disk if fields.pop("is_prompt", False) else frozenset(),
        **fields,
    )


def test_answers_of_an_earlier_run_are_learned(tenants, tokenizer):
    prompt = node_of(tokenizer, "a", "What does os.getcwd do?")
    answer = node_of(tokenizer, "a", "Retu", prompt, is_generated=True)
    tenants.add_nodes([prompt, answer])
    text = "What does os.getcwd do?Return it"
    known = [*prompt.tokens, *answer.tokens]
    assert tenants.get("a").history.recall(text)[: len(known)].tolist() == known
    assert tenants.get("b").history.recall(text).tolist() == tokenizer.encode(text)


def test_calls_in_answers_of_an_earlier_run_are_learned(tokenizer):
    def calls_in(ids):
        assert tokenizer.spell(ids) == b"os.getcwd"
        return [PastCall("f", '{"a":  1}')]

    tenants = Tenants(lambda: History(tokenizer), calls_in)
    prompt = node_of(tokenizer, "a", "Call it.", is_prompt=True)
    tenants.add_nodes([prompt, node_of(tokenizer, "a", "os.getcwd", prompt, is_generated=True)])
    call = {"id": "any", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "tool_calls": [call]}
    [recalled] = tenants.get("a").calls.recall([message])
    assert recalled["tool_calls"][0]["function"]["arguments"] == '{"a":  1}'
    assert tenants.get("b").calls.recall([message]) == [message]


def test_a_prompt_that_was_saved_whole_is_learned(tenants, tokenizer):
    tenants.add_nodes([node_of(tokenizer, "", "a prompt", is_prompt=True)])
    assert tenants.get("").history.num_tokens_held > 0


def test_a_cut_within_a_prompt_teaches_nothing(tenants, tokenizer):
    tenants.add_nodes([node_of(tokenizer, "", "in the midd")])
    assert tenants.get("").history.num_tokens_held == 0


def test_after_a_restart_the_newest_is_learned_as_far_as_there_is_room(
    tenants, tokenizer, monkeypatch
):
    texts = {"an old one": 1.0, "some new one": 3.0, "the newest": 4.0}
    nodes = [
        node_of(tokenizer, "", text, is_prompt=True, last_used_s=used_s)
        for text, used_s in texts.items()
    ]
    monkeypatch.setattr(module, "MAX_LEARNED_TOKENS", nodes[1].end + nodes[2].end)
    tenants.add_nodes(nodes)
    assert tenants.get("").history.num_tokens_held == nodes[1].end + nodes[2].end


def test_what_another_server_has_said_is_learned_when_its_text_comes(tenants, tokenizer):
    tenant = tenants.get("a")
    prompt = node_of(tokenizer, "a", "What does os.getcwd do?")
    answer = node_of(tokenizer, "a", "Retu", prompt, is_generated=True)
    elsewhere = node_of(tokenizer, "a", "Why is os.path a module of its own?")
    other = node_of(tokenizer, "a", "Retu", elsewhere, is_generated=True)
    strange = node_of(tokenizer, "b", "Retu", node_of(tokenizer, "b", "What"), is_generated=True)
    tenants.add_nodes([prompt, answer, elsewhere, other, strange])
    text = "What does os.getcwd do?Return it"
    known = [*prompt.tokens, *answer.tokens]
    assert tenants.learn_more(tenant, tenant.history.recall(text))
    assert tenant.history.recall(text)[: len(known)].tolist() == known
    assert not tenants.learn_more(tenant, tenant.history.recall(text))
    assert tenant.history.num_tokens_held == len(known)


def test_nodes_that_are_gone_teach_nothing(tenants, tokenizer):
    tenant = tenants.get("a")
    prompt = node_of(tokenizer, "a", "What does os.getcwd do?")
    answer = node_of(tokenizer, "a", "Retu", prompt, is_generated=True)
    tenants.add_nodes([prompt, answer])
    tenants.remove_nodes([answer.key])
    ids = tenant.history.recall("What does os.getcwd do?Return it")
    assert not tenants.learn_more(tenant, ids)
