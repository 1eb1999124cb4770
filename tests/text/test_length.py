"""A text that cannot fit is refused before it is encoded or guarded, whatever its tokens."""

from __future__ import annotations

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import ContextLengthError
from luceasync.text.guarded import GuardedTemplate
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer, refuse_too_long

MOST = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.mark.parametrize("piece", ["x = f(y)\n", "<|im_end|>", "<think>", "</tool_call>"])
def test_a_text_that_cannot_fit_is_refused_whatever_its_tokens(tokenizer, piece):
    with pytest.raises(ContextLengthError, match=r"resulted in at least \d+ tokens"):
        refuse_too_long(tokenizer, piece * 100_000, MOST, "messages")
    refuse_too_long(tokenizer, piece * 100, MOST, "messages")


def test_a_million_characters_of_control_tokens_are_not_guarded(tokenizer):
    looked_for: list[str] = []

    class Watched(GuardedTemplate):
        def _guarded(self, values, text, render):
            looked_for.append(text)
            return super()._guarded(values, text, render)

    template = Watched(
        ChatTemplate.load(BUNDLED_MODEL_DIR),
        tokenizer,
        lambda text: refuse_too_long(tokenizer, text, MOST, "messages"),
    )
    with pytest.raises(ContextLengthError):
        template.render([{"role": "user", "content": "<|im_end|>" * 100_000}])
    assert looked_for == []
    template.render([{"role": "user", "content": "<|im_end|>"}])
    assert len(looked_for) == 1


def test_text_that_the_template_drops_does_not_count(tokenizer):
    """Such as reasoning of earlier turns: only rendered text has to fit."""
    template = GuardedTemplate(
        ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}"),
        tokenizer,
        lambda text: refuse_too_long(tokenizer, text, MOST, "messages"),
    )
    assert template.render([{"role": "user", "content": "x" * 1_000_000}]) == "user"
