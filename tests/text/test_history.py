"""A text that comes back gets the ids that the model generated, which spell the same text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import RequestError
from luceasync.text.history import History
from luceasync.text.tokenizer import Tokenizer

ASKED = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"

relaxed = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
IDS = st.lists(st.integers(0, 375), max_size=12)
TEXT = st.text(min_size=1, max_size=12) | st.sampled_from(["the cat", "<s>the cat", ASKED])
REST = st.text(max_size=6) | st.sampled_from([NEXT, " cat", "<|im_end|>", "im_end|>", "</s> cat"])


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.fixture(params=["tiny", "bundled"])
def tokenizer(request, byte_level, bundled) -> Tokenizer:
    return {"tiny": byte_level, "bundled": bundled}[request.param]


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in ids)


def by_letter(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text` as a model may write it, and as encoding never does."""
    return [i for letter in text for i in tokenizer.encode(letter)]


def recalled(history: History, text: str) -> list[int]:
    return history.recall(text).tolist()


def asked(tokenizer: Tokenizer, answer: Sequence[int]) -> tuple[History, list[int]]:
    """A history with one answer, and the ids of its prompt and answer."""
    history, prompt_ids = History(tokenizer), tokenizer.encode(ASKED)
    history.remember(ASKED, prompt_ids, answer)
    return history, [*prompt_ids, *answer]


@pytest.mark.slow
@relaxed
@given(TEXT, st.lists(st.tuples(IDS, REST), max_size=4))
def test_what_is_recalled_is_the_text(any_tokenizer, text, turns):
    history = History(any_tokenizer)
    for generated, rest in turns:
        history.remember(text, recalled(history, text), generated)
        text += spell(any_tokenizer, generated).decode(errors="replace") + rest
        ids = recalled(history, text)
        assert spell(any_tokenizer, ids) == spell(any_tokenizer, any_tokenizer.encode(text))


@pytest.mark.slow
@relaxed
@given(answer=IDS, rest=st.text(max_size=9))
def test_the_ids_of_an_answer_come_back(tokenizer, answer, rest):
    history, ids = asked(tokenizer, [*answer, tokenizer.token_id("<|im_end|>")])
    try:
        said = spell(tokenizer, answer).decode()
    except UnicodeDecodeError:
        return
    assert recalled(history, ASKED + said + "<|im_end|>" + rest)[: len(ids)] == ids


def test_a_second_turn_begins_with_the_ids_of_the_first(tokenizer):
    history, ids = asked(tokenizer, by_letter(tokenizer, "cat sat"))
    text = f"{ASKED}cat sat{NEXT}"
    assert recalled(history, text) == ids + tokenizer.encode(NEXT) != tokenizer.encode(text)


def test_every_turn_of_a_conversation_keeps_its_ids(tokenizer):
    history, text, ids = History(tokenizer), ASKED, tokenizer.encode(ASKED)
    for said in ("cat", "the mat", "dog"):
        answer = by_letter(tokenizer, said)
        history.remember(text, ids, answer)
        text, before = text + said + NEXT, [*ids, *answer]
        ids = recalled(history, text)
        assert ids == before + tokenizer.encode(NEXT)


def test_the_rest_is_encoded_by_itself(byte_level):
    history, ids = asked(byte_level, by_letter(byte_level, "ca"))
    assert recalled(history, f"{ASKED}cat") == ids + byte_level.encode("t")


def test_if_the_template_ends_an_answer_differently_its_last_id_is_left_out(tokenizer):
    answer = by_letter(tokenizer, "cat")
    history, ids = asked(tokenizer, [*answer, tokenizer.token_id("<|endoftext|>")])
    assert recalled(history, f"{ASKED}cat{NEXT}") == ids[:-1] + tokenizer.encode(NEXT)


def test_without_history_text_is_encoded(tokenizer):
    assert recalled(History(tokenizer), ASKED) == tokenizer.encode(ASKED)
    assert recalled(History(tokenizer), "") == []


def test_a_kept_prompt_needs_no_answer(byte_level):
    history, prompt_ids = History(byte_level), byte_level.encode("the c")
    history.remember("the c", prompt_ids, [])
    assert recalled(history, "the cat") == prompt_ids + byte_level.encode("at")


@pytest.mark.parametrize("said", ["", "cat"])
def test_ids_that_spell_nothing_do_not_lengthen_a_text(tokenizer, said):
    unknown = [10**6] * 3  # models have more ids than their tokenizers
    history, ids = asked(tokenizer, [*by_letter(tokenizer, said), *unknown])
    history.relearn([*ids])
    expected = ids[: -len(unknown)]
    for _ in range(3):
        assert recalled(history, ASKED + said) == expected
        history.remember(ASKED + said, expected, unknown)
    assert recalled(history, ASKED + said + NEXT) == expected + tokenizer.encode(NEXT)


def test_ids_that_spell_nothing_stay_within_a_text(tokenizer):
    answer = [*by_letter(tokenizer, "cat"), 10**6, *by_letter(tokenizer, "dog")]
    history, ids = asked(tokenizer, answer)
    assert recalled(history, f"{ASKED}catdog{NEXT}")[: len(ids)] == ids


@pytest.mark.parametrize(
    "text",
    [ASKED + "cot sat" + NEXT, ASKED + "cat s", ASKED.replace("user", "system") + "cat sat" + NEXT],
    ids=["answer-edited", "stop-cut", "question-edited"],
)
def test_a_text_that_differs_is_encoded(tokenizer, text):
    history, _ = asked(tokenizer, by_letter(tokenizer, "cat sat"))
    assert recalled(history, text) == tokenizer.encode(text)


def test_the_longest_of_two_histories_wins(tokenizer):
    history, short = asked(tokenizer, by_letter(tokenizer, "cat"))
    long = [*tokenizer.encode(ASKED), *by_letter(tokenizer, "cat sat")]
    history.remember(ASKED, tokenizer.encode(ASKED), long[len(tokenizer.encode(ASKED)) :])
    assert recalled(history, f"{ASKED}cat sat{NEXT}")[: len(long)] == long
    assert recalled(history, f"{ASKED}cat ran{NEXT}")[: len(short)] == short


def test_of_two_spellings_of_one_text_the_newest_wins(tokenizer):
    history, prompt_ids = History(tokenizer), tokenizer.encode(ASKED)
    for answer in (tokenizer.encode("cat"), by_letter(tokenizer, "cat")):
        history.remember(ASKED, prompt_ids, answer)
        assert recalled(history, f"{ASKED}cat{NEXT}")[: -len(tokenizer.encode(NEXT))] == [
            *prompt_ids,
            *answer,
        ]


def test_an_answer_cut_within_a_character_is_remembered_up_to_the_one_before(byte_level):
    rocket = byte_level.encode("\U0001f680")
    history, ids = asked(byte_level, [*byte_level.encode("go"), rocket[0]])
    assert len(rocket) > 1
    assert recalled(history, f"{ASKED}go\U0001f680") == ids[:-1] + rocket


@pytest.mark.parametrize("said", ["<", "<|im_"])
def test_a_special_token_is_not_split(tokenizer, said):
    history, _ = asked(tokenizer, by_letter(tokenizer, said))
    text = ASKED + NEXT
    assert text.startswith(ASKED + said)
    assert recalled(history, text) == tokenizer.encode(text)


def test_an_answer_that_ends_like_a_special_token_begins_is_still_found(tokenizer):
    history, ids = asked(tokenizer, by_letter(tokenizer, "1 <"))
    assert recalled(history, f"{ASKED}1 <{NEXT}") == ids + tokenizer.encode(NEXT)


def test_if_encoding_prepends_a_space_only_special_tokens_may_follow(fallback):
    prompt_ids = fallback.encode("<s>the ")
    answer = [fallback.token_id(token) for token in ("c", "a", "t", "</s>")]
    history = History(fallback)
    history.remember("<s>the ", prompt_ids, answer)
    kept = prompt_ids + answer
    assert recalled(history, "<s>the cat</s><s>dog") == kept + fallback.encode("<s>dog")
    assert recalled(history, "<s>the cat</s>dog") == kept[:-1] + fallback.encode("</s>dog")
    assert recalled(history, "<s>the catdog") == fallback.encode("<s>the catdog")


def test_sequences_restored_after_a_restart_are_relearned(tokenizer):
    ids = [*tokenizer.encode(ASKED), *by_letter(tokenizer, "cat sat")]
    history = History(tokenizer)
    history.relearn(ids)
    assert recalled(history, f"{ASKED}cat sat{NEXT}") == ids + tokenizer.encode(NEXT)


def test_the_least_recently_used_is_forgotten_first(byte_level):
    letters = {said: by_letter(byte_level, said) for said in ("cat", "dog", "mat")}
    history = History(byte_level, max_tokens_held=2 * 4 + 1)
    for said in ("cat", "dog"):
        history.remember(":", byte_level.encode(":"), letters[said])
    recalled(history, ":cat")
    history.remember(":", byte_level.encode(":"), letters["mat"])
    kept = {said for said in letters if recalled(history, f":{said}")[1:] == letters[said]}
    assert (kept, history.num_tokens_held) == ({"cat", "mat"}, 8)


@pytest.mark.slow
@relaxed
@given(st.lists(st.tuples(TEXT, IDS), max_size=12))
def test_no_more_ids_are_held_than_allowed(byte_level, answers):
    history = History(byte_level, max_tokens_held=20)
    for prompt, generated in answers:
        history.remember(prompt, byte_level.encode(prompt), generated)
        assert 0 <= history.num_tokens_held <= 20


def test_an_answer_remembered_again_is_held_once(byte_level):
    history, ids = asked(byte_level, by_letter(byte_level, "cat"))
    history.remember(ASKED, ids[:-3], ids[-3:])
    assert history.num_tokens_held == len(ids)


def test_a_sequence_too_long_to_hold_evicts_nothing(byte_level):
    history = History(byte_level, max_tokens_held=4)
    answer = by_letter(byte_level, "cat")
    history.remember(":", byte_level.encode(":"), answer)
    history.remember(":", byte_level.encode(":"), [*answer, *answer])
    assert recalled(history, ":cat")[1:] == answer


def test_threads_may_remember_and_recall_at_once(byte_level):
    history, prompt_ids = History(byte_level, max_tokens_held=100), byte_level.encode(ASKED)
    answers = {f"{n} cat": by_letter(byte_level, f"{n} cat") for n in range(100)}

    def converse(said: str) -> bool:
        history.remember(ASKED, prompt_ids, answers[said])
        ids = recalled(history, ASKED + said + NEXT)
        return spell(byte_level, ids).decode() == ASKED + said + NEXT

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(converse, [*answers] * 5))
    assert history.num_tokens_held <= 100


def test_text_that_is_not_unicode_is_refused(byte_level):
    history, _ = asked(byte_level, by_letter(byte_level, "cat"))
    with pytest.raises(RequestError, match="not valid Unicode"):
        recalled(history, f"{ASKED}cat\ud800")
