"""Where a text's last tokens stood before: the places that a slow search of all places finds."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.cyext.copies import CopyIndex
from tests.reference.copies import SlowCopies

FEW = st.lists(st.integers(0, 3), max_size=60)  # tokens of few kinds, which repeat
# A text, and what is said of it: parts of it from some place on, and now and then another token.
EDITS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 14)), max_size=12)
COPIED = tuple(range(10, 40))
PARTS = st.lists(FEW, min_size=1, max_size=6)


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def index_of(*tokens: int, ends=()) -> CopyIndex:
    index = CopyIndex(ends)
    index.extend(ids(*tokens))
    return index


@pytest.mark.slow
@given(PARTS, st.lists(FEW, max_size=2), st.sampled_from([1, 2, 1000]), st.integers(0, 12))
def test_a_match_is_the_one_that_a_slow_search_finds(parts, before, num_tried, num_tokens):
    fast, slow = CopyIndex({3}, num_tried), SlowCopies({3}, num_tried)
    for text in before:
        fast.put_before(ids(*text))
        slow.put_before(text)
    for part in parts:
        fast.extend(ids(*part))
        slow.extend(part)
        found = fast.find()
        assert found == slow.find()
        if found[1]:
            assert fast.copied(found[0], num_tokens) == slow.copied(found[0], num_tokens)


@pytest.mark.slow
@given(EDITS)
def test_a_copy_is_resumed_where_a_slow_search_resumes_it(edits):
    fast, slow = CopyIndex(), SlowCopies()
    for begin, num_tokens in [(0, 30), *edits]:
        for token in (*COPIED[begin : begin + num_tokens], 50 + begin % 3):
            fast.extend(ids(token))
            slow.extend([token])
            assert fast.find() == slow.find()


def test_what_followed_is_copied_from_the_longest_match():
    index = index_of(1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3)
    place, length, _ = index.find()
    assert (length, index.copied(place, 3)) == (3, [7, 7, 2])


@pytest.mark.parametrize(
    ("changed", "following"),
    [
        ((99, 26), 27),  # 99 instead of 25
        ((99, 98, 26), 27),  # two for one
        ((99, 25), 26),  # 99 is new
        ((27,), 28),  # 25 and 26 are left out
    ],
)
def test_behind_a_changed_word_the_copy_goes_on(changed, following):
    index = index_of(*COPIED, 7, *COPIED[:15])
    assert index.copied(index.find()[0], 1) == [25]
    index.extend(ids(*changed))
    place, length, is_resumed = index.find()
    assert is_resumed and length < 3 and index.copied(place, 1) == [following]
    index.extend(ids(*range(following, 40)))
    assert index.find()[2] == (40 - following < 8)


def test_a_copy_that_was_lost_is_soon_forgotten():
    index = index_of(*COPIED, 7, *COPIED[:15])
    index.find()
    assert index.is_lost
    index.extend(ids(*range(100, 117)))
    assert not index.is_lost
    index.extend(ids(26))
    assert index.find() == (-1, 0, False)


def test_of_equal_matches_the_newest_counts():
    index = index_of(1, 2, 9, 1, 2, 8, 1, 2)
    assert index.copied(index.find()[0], 1) == [8]


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2), (1, 2, 3, 4, 2)])
def test_less_than_two_tokens_are_no_match(tokens):
    assert index_of(*tokens).find() == (-1, 0, False)


def test_a_repetition_goes_on_beyond_what_is_known():
    index = index_of(1, 2, 3, 1, 2, 3)
    assert index.copied(index.find()[0], 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_nothing_is_copied_behind_a_token_that_ends_texts():
    index = index_of(1, 2, 3, 9, 4, 5, 1, 2, ends={9})
    assert index.copied(index.find()[0], 5) == [3, 9]


def test_a_text_put_before_is_copied_from_and_never_beyond():
    index = CopyIndex()
    index.put_before(ids(1, 2, 3))
    index.put_before(ids(4, 5, 6))
    index.extend(ids(1, 2))
    assert index.copied(index.find()[0], 9) == [3]
    assert (index.num_tokens, index.end) == (2, 10)


def test_nothing_comes_before_a_text_that_has_begun():
    with pytest.raises(ValueError, match="has begun"):
        index_of(1).put_before(ids(2))


def test_the_rest_of_a_growing_text_is_taken_up():
    index, text = CopyIndex(), ids(1, 2, 3)
    index.extend(text)
    text.extend([1, 2])
    index.extend(text, index.num_tokens)
    assert index.num_tokens == 5
    assert index.copied(index.find()[0], 1) == [3]


def test_a_copy_goes_its_own_way():
    one = index_of(1, 2, 3, 4, 1, 2)
    other = one.copy()
    one.extend(ids(3))
    other.extend(ids(9))
    assert one.copied(one.find()[0], 1) == [4] and other.find() == (-1, 0, False)
    other.extend(ids(1, 2))
    assert other.copied(other.find()[0], 1) == [9]


def test_equal_tokens_from_two_places_are_counted():
    index = index_of(1, 2, 3, 4, 1, 2, 3, 5)
    assert [index.num_equal(0, 4, most) for most in (2, 9)] == [2, 3]
    assert index.num_equal(2, 8, 9) == 0, "nothing has come yet"


@pytest.mark.parametrize("tokens", [[1, 2], b"ab", array("q", [1]), array("f", [1.0])])
def test_tokens_are_int32(tokens):
    with pytest.raises((ValueError, TypeError)):
        CopyIndex().extend(tokens)


def test_a_token_takes_42_bytes_at_most():
    index, one = CopyIndex(), ids(*range(97))
    while index.num_tokens < 60_000:
        index.extend(one)
        assert index.num_bytes <= 42 * max(index.num_tokens, 1024)
