"""Among many that start alike, the one that shares most is found, and all that are shared whole."""

from hypothesis import given
from hypothesis import strategies as st

from luceasync.prefix_tree.node import common_prefix, pack_tokens
from luceasync.prefix_tree.tree import Siblings

SPANS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), unique=True, max_size=20
)
PROMPT = st.lists(st.integers(0, 2), max_size=10)


def build(spans: list[tuple[int, ...]]) -> Siblings:
    siblings = Siblings()
    for span in spans:
        siblings.add(pack_tokens(span), bytes(span))
    return siblings


@given(SPANS, PROMPT)
def test_whole_ones_are_those_that_the_prompt_starts_with(spans, prompt):
    expected = {bytes(span) for span in spans if list(span) == prompt[: len(span)]}
    found = build(spans).whole(pack_tokens(prompt))
    assert set(found) == expected and len(found) == len(expected)


@given(SPANS, PROMPT, st.sets(st.integers(0, 19)))
def test_the_longest_part_is_the_longest_among_the_usable(spans, prompt, hidden):
    usable = {bytes(span) for i, span in enumerate(spans) if i not in hidden}
    packed = pack_tokens(prompt)
    shared = {key: common_prefix(pack_tokens(list(key)), packed) for key in usable}
    key, num_tokens = build(spans).longest_part(packed, usable.__contains__)
    assert num_tokens == max(shared.values(), default=0)
    assert key is None if num_tokens == 0 else shared[key] == num_tokens


@given(SPANS, st.data())
def test_what_is_discarded_is_found_no_more(spans, data):
    siblings = build(spans)
    left = [span for span in spans if data.draw(st.booleans())]
    for span in set(spans) - set(left):
        siblings.discard(pack_tokens(span))
    assert sorted(siblings.keys) == sorted(bytes(span) for span in left)
    assert siblings.longest == max(map(len, left), default=0)
