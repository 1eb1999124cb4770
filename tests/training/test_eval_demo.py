"""When an answer that came over HTTP counts as exact."""

import pytest
from tokenizers import Tokenizer

from luceasync.config import BUNDLED_MODEL_DIR
from training.demo.evaluation import expected_ids
from training.eval_demo import MODEL_DIR, is_exact, report

LONG = "Return the number of items in a container, été by été. " * 5


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_the_bundled_model_is_asked():
    assert MODEL_DIR == BUNDLED_MODEL_DIR


def test_a_short_answer_must_be_whole_and_must_stop(tokenizer):
    assert is_exact(tokenizer, "Goodbye!", "Goodbye!", "stop")
    assert not is_exact(tokenizer, "Goodbye!", "Goodbye!", "length")
    assert not is_exact(tokenizer, "Goodbye!", "Goodbye", "stop")


def test_a_long_answer_is_compared_over_its_first_tokens(tokenizer):
    begun = tokenizer.decode(expected_ids(tokenizer, LONG))
    assert is_exact(tokenizer, LONG, begun, "length")
    assert not is_exact(tokenizer, LONG, begun[:-1], "length")
    assert not is_exact(tokenizer, LONG, begun, "stop")


@pytest.mark.parametrize("tail", ["", "\ufffd"])
def test_half_a_character_at_the_end_is_no_miss(tokenizer, tail):
    answer = next(LONG[i:] for i in range(60) if _ends_in_half(tokenizer, LONG[i:]))
    begun = tokenizer.decode(expected_ids(tokenizer, answer)).rstrip("\ufffd")
    assert is_exact(tokenizer, answer, begun + tail, "length")


def test_report_counts_per_wording_and_in_all():
    entries = [{"template": "{n}?", "messages": [{"content": "len?"}], "answer": "A."}] * 2
    lines = []
    report(entries, [(True, "A."), (False, "B.")], show=lines.append)
    assert lines[-2:] == ["   1 of   2  {n}?", "1 of 2 exact: 50.0%"]


def _ends_in_half(tokenizer, answer):
    return tokenizer.decode(expected_ids(tokenizer, answer)).endswith("\ufffd")
