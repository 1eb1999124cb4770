"""A client's cache marks within messages, as numbers of tokens, with any template."""

from __future__ import annotations

import pytest

from luceasync.errors import RequestError
from luceasync.text.shared_prefix import MAX_MARKS, CommonPrefix, marked_tokens
from luceasync.text.template import ChatTemplate
from tests.text.test_replay_check import QWEN3_5

TRIMMING = ChatTemplate("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
SYSTEM = {"role": "system", "content": "  static part\n\nof today  "}
ASKED = {"role": "user", "content": "0 the cat\na cat"}


def marked_texts(tokenizer, template, messages, *marks) -> list[str]:
    """The text before each mark that is found."""
    text = template.render(messages)
    ids = tokenizer.encode(text)
    places = marked_tokens(CommonPrefix(tokenizer), text, ids, messages, marks, template.render)
    return [b"".join(map(tokenizer.token_bytes, ids[:place])).decode() for place in places]


@pytest.mark.parametrize("template", [TRIMMING, QWEN3_5])
def test_marked_tokens_end_with_the_marked_text(byte_level, template):
    [found] = marked_texts(byte_level, template, [SYSTEM, ASKED], (0, 15))
    assert found.endswith("static part\n\n")
    [found] = marked_texts(byte_level, template, [SYSTEM, ASKED], (1, 9))
    assert found.endswith("0 the cat")


def test_marks_at_the_ends_of_messages_are_left_out(byte_level):
    num_chars = len(ASKED["content"])
    for place in (0, num_chars, num_chars + 5):
        assert marked_texts(byte_level, TRIMMING, [SYSTEM, ASKED], (1, place)) == []


def test_the_last_marks_count_and_each_once(byte_level):
    marks = [(0, 5), (0, 8), (1, 1), (1, 5), (1, 9), (1, 12)]
    found = marked_texts(byte_level, TRIMMING, [SYSTEM, ASKED], *marks)
    assert 0 < len(found) <= MAX_MARKS and not any(text.endswith("sta") for text in found)
    assert len(marked_texts(byte_level, TRIMMING, [SYSTEM, ASKED], (1, 9), (1, 9))) == 1


def test_a_template_that_refuses_other_words_gives_no_mark(byte_level):
    def refuse(messages):
        raise RequestError("no")

    text = TRIMMING.render([SYSTEM, ASKED])
    ids = byte_level.encode(text)
    prefix = CommonPrefix(byte_level)
    assert marked_tokens(prefix, text, ids, [SYSTEM, ASKED], [(1, 3)], refuse) == ()


def test_a_message_without_text_gives_no_mark(byte_level):
    said = [SYSTEM, {"role": "assistant", "content": None}]
    ids = byte_level.encode("x")
    assert marked_tokens(CommonPrefix(byte_level), "x", ids, said, [(1, 3)], TRIMMING.render) == ()
