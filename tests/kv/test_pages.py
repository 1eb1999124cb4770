"""Each chunk gets its own page, in the given order, and returns it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, PageMap, num_chunks


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)]
)
def test_chunks_that_tokens_touch(tokens: int, chunks: int):
    assert num_chunks(tokens) == chunks


def test_only_new_chunks_are_events():
    pages = PageMap(2, 8)
    assert pages.extend(1, 65) == [PageEvent(1, 0, 0), PageEvent(1, 1, 1)]
    assert pages.extend(1, 128) == []
    assert pages.extend(1, 10) == []
    assert pages.extend(1, 129) == [PageEvent(1, 2, 2)]


def test_a_lane_has_pages_for_whole_chunks():
    pages = PageMap(2, 8)
    pages.extend(1, 65)
    assert (pages.num_tokens(0), pages.num_tokens(1)) == (0, 2 * CHUNK_TOKENS)
    pages.release(1)
    assert pages.num_tokens(1) == 0


def test_lanes_have_their_own_pages():
    pages = PageMap(2, 4)
    pages.extend(0, 256)
    assert pages.extend(1, 64) == [PageEvent(1, 0, 0)]
    pages.release(0)
    assert (pages.pages(0), pages.pages(1)) == ((), (0,))


def test_release_gives_every_page_back():
    pages = PageMap(1, 4)
    first = pages.extend(0, 256)
    pages.release(0)
    assert pages.extend(0, 256) == first


def test_pages_are_handed_out_in_the_given_order():
    pages = PageMap(1, 4, order=[2, 0, 3, 1])
    assert [event.page for event in pages.extend(0, 130)] == [2, 0, 3]
    assert pages.extend(0, 256) == [PageEvent(0, 3, 1)]
    assert pages.pages(0) == (2, 0, 3, 1)


@pytest.mark.parametrize("order", [[0, 0], [0], [1, 2], [0, 1, 2]])
def test_an_order_names_every_page_once(order: list[int]):
    with pytest.raises(AssertionError, match="every page once"):
        PageMap(1, 2, order)


def test_more_tokens_than_pages_are_our_own_mistake():
    pages = PageMap(1, 2)
    pages.extend(0, 2 * CHUNK_TOKENS)
    with pytest.raises(AssertionError, match="129 tokens do not fit 2 pages"):
        pages.extend(0, 2 * CHUNK_TOKENS + 1)


def test_its_repr_tells_the_pages_in_use():
    pages = PageMap(2, 4)
    pages.extend(1, 70)
    assert repr(pages) == "PageMap(4 pages a lane; used 0: 0, 1: 2)"


@given(steps=st.lists(st.integers(0, 512), max_size=20), order=st.permutations(range(8)))
def test_the_events_of_any_growth_are_the_map(steps: list[int], order: list[int]):
    pages, seen = PageMap(1, 8, order), {}
    for num_tokens in steps:
        for event in pages.extend(0, num_tokens):
            assert seen.setdefault(event.chunk, event.page) == event.page
    assert pages.pages(0) == tuple(order[: num_chunks(max(steps, default=0))])
    assert seen == dict(enumerate(pages.pages(0)))
