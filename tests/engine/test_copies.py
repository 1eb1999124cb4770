"""What of a prompt is indexed, so that proposals can be copied from it."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path

import pytest

from luceasync.engine.copies import LATE_TOKENS, MAX_CHARS, PromptCopies, unnumbered
from luceasync.text.history import History
from luceasync.text.prompt import RenderedPrompt, Tenant
from luceasync.text.tokenizer import Tokenizer

CODE = ["def f(x):", "    if x:", "", "        return 1", "    return 2"]


def numbered(form: str, first: int = 9) -> str:
    return "\n".join(form.format(n, line) for n, line in enumerate(CODE, first))


@pytest.mark.parametrize("form", ["{:6}\t{}", "{:>5}→{}", "{}:{}", "{}: {}", "{:3} | {}", "{}|{}"])
def test_a_file_that_is_shown_with_line_numbers_is_indexed_without_them(form):
    text = f"Here it is:\n{numbered(form)}\nand so on"
    assert unnumbered(text) == ["\n".join(CODE) + "\n"]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(CODE),
        "1: one\n2: two",  # two lines may be anything
        "3: three\n2: two\n1: one",
        "1: one\n2\ttwo\n3| three",
        "10 green bottles\n11 more\n12 more",
        "",
    ],
)
def test_other_texts_are_not(text):
    assert unnumbered(text) == []


def test_each_file_is_a_text_of_its_own():
    text = numbered("{}\t{}") + "\n" + numbered("{}\t{}", 1) + "\nthen\n" + numbered("{}: {}")
    assert unnumbered(text) == ["\n".join(CODE) + "\n"] * 3


def test_of_much_numbered_text_the_last_is_taken():
    one = numbered("{}\t{}")
    assert len(unnumbered(f"{one}\n\n{one}", max_chars=len("\n".join(CODE)) + 1)) == 1
    lines = "\n".join(f"{n}\tx" for n in range(MAX_CHARS))
    assert unnumbered(f"{lines}\n\n{one}") == ["\n".join(CODE) + "\n"]


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


def prompt_of(tokenizer: Tokenizer, text: str, tenant: bytes = b"t" * 32) -> RenderedPrompt:
    ids = array("i", tokenizer.encode(text, special=False))
    return RenderedPrompt(Tenant(tenant, History(tokenizer)), text, ids, ())


def test_an_edit_quotes_lines_without_their_numbers(tokenizer):
    """The lines follow each other there; in the prompt a number stands between them."""
    copies = PromptCopies(tokenizer)
    index = copies.index(prompt_of(tokenizer, f"{numbered('{:6}→{}')}\nnow edit: "), frozenset())
    whole = "\n".join(CODE)
    quoted = whole[: whole.index("return 1")]
    index.extend(array("i", tokenizer.encode(quoted, special=False)))
    place, length, _ = index.find()
    found = tokenizer.spell(index.copied(place, 24)).decode()
    assert length > 4 and found.startswith("return 1\n    return 2\n")


def test_a_prompt_given_as_ids_is_indexed_as_it_is(tokenizer):
    prompt = RenderedPrompt(Tenant(b"t" * 32, History(tokenizer)), None, array("i", [5, 6, 7]), ())
    assert PromptCopies(tokenizer).index(prompt, frozenset()).num_tokens == 3


def encodings_of(tokenizer, monkeypatch) -> list[str]:
    """The texts that are encoded from now on."""
    encode, encoded = tokenizer.encode, []

    def heard(text: str, *, special: bool = True) -> list[int]:
        encoded.append(text)
        return encode(text, special=special)

    monkeypatch.setattr(tokenizer, "encode", heard)
    return encoded


def test_a_text_is_encoded_once_for_a_tenant_and_anew_for_another(tokenizer, monkeypatch):
    """By how long it takes, nobody learns what others have sent."""
    first, other = (prompt_of(tokenizer, numbered("{}\t{}"), key * 32) for key in (b"a", b"b"))
    encoded = encodings_of(tokenizer, monkeypatch)
    copies = PromptCopies(tokenizer)
    for prompt, num_times in ((first, 1), (first, 1), (other, 2), (first, 2)):
        copies.index(prompt, frozenset())
        assert len(encoded) == num_times


def test_the_texts_that_were_used_longest_ago_are_forgotten(tokenizer, monkeypatch):
    texts = ["\n".join(f"{n}: line {n} of {name}" for n in range(3)) for name in "abcd"]
    prompts = [prompt_of(tokenizer, text) for text in texts]
    encoded = encodings_of(tokenizer, monkeypatch)
    copies = PromptCopies(tokenizer, max_chars_held=2 * len(unnumbered(texts[0])[0]))
    for number, num_times in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        copies.index(prompts[number], frozenset())
        assert len(encoded) == num_times


def test_nothing_waits_for_the_index_of_a_long_prompt(tokenizer, monkeypatch):
    """Each choice has its own, since its answer differs."""
    copies, ids = PromptCopies(tokenizer), array("i", range(LATE_TOKENS + 1))
    index, may_begin = copies.index, threading.Event()

    def late(prompt, stop_ids):
        assert may_begin.wait(60)
        return index(prompt, stop_ids)

    monkeypatch.setattr(copies, "index", late)
    prompt = RenderedPrompt(Tenant(b"t" * 32, History(tokenizer)), None, ids, ())
    coming = copies.coming(prompt, frozenset(), 2)
    assert [each.found for each in coming] == [None, None]
    may_begin.set()
    copies.close()
    first, second = (each.found for each in coming)
    first.extend(array("i", [5]))
    assert (first.num_tokens, second.num_tokens) == (len(ids) + 1, len(ids))


def test_that_of_a_short_prompt_is_there_at_once(tokenizer):
    copies = PromptCopies(tokenizer)
    [coming] = copies.coming(prompt_of(tokenizer, "one two three"), frozenset(), 1)
    assert coming.found.num_tokens > 0
    copies.close()
