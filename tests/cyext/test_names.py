"""Tensor names: only the canonical text is valid, and a rename moves layers to their new shard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.cyext.names import format_name, parse_name, rename_table
from tests.reference import names as slow

NUMBERS = st.integers(0, 2**16 - 1)
KIND = st.sampled_from(("attn_k", "attn_v", "conv", "delta")) | st.from_regex(
    r"[a-z][a-z0-9_]{0,63}", fullmatch=True
)
WORDS = "ls l s 0 1 07 65535 65536 99999999999 -1 +1 _ . attn_k attn_v conv delta attn _k ٣ ² é"
PIECES = st.sampled_from([*WORDS.split(), " ", "\n", "\0"])
NEAR_NAMES = st.lists(PIECES, max_size=7).map("".join)
BEGINS = st.sets(st.integers(1, 40), max_size=5).map(lambda rest: [0, *sorted(rest)])


def parsed_or_none(name: str) -> tuple[int, str, int] | None:
    try:
        return parse_name(name)
    except ValueError:
        return None


@pytest.mark.slow
@given(NUMBERS, KIND, NUMBERS)
def test_what_is_built_is_taken_apart_again(shard: int, kind: str, layer: int) -> None:
    assert parse_name(format_name(shard, kind, layer)) == (shard, kind, layer)


@pytest.mark.slow
@given(NEAR_NAMES | st.text() | st.from_regex(slow.NAME, fullmatch=True))
def test_the_same_texts_are_names_as_in_the_slow_truth(name: str) -> None:
    assert parsed_or_none(name) == slow.parse_name(name)


NO_NAMES = (
    "tokens ls ls0 ls0_conv ls_conv.0 ls0_conv. ls0_.1 ls00_conv.1 ls0_conv.01 ls-1_conv.0 "
    "ls0_conv.+1 ls65536_conv.0 ls0_conv.65536 LS0_conv.0 ls0_Conv.0 ls0_0conv.0 "
    "ls0__conv.0 ls0_con-v.0 ls0_conv.0.1 "
    "ls٣_conv.0"
)


@pytest.mark.parametrize("name", [*NO_NAMES.split(), "", " ls0_conv.0", "ls0_conv.0\n"])
def test_anything_else_is_refused_and_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected ls<shard>_<kind>\.<layer>") as caught:
        parse_name(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("shard", "kind", "layer", "words"),
    [
        (-1, "conv", 0, "shard -1"),
        (2**16, "conv", 0, "shard 65536"),
        (0, "conv", 2**70, f"layer {2**70}"),
        (0, "Logits", 0, "kind 'Logits'"),
        (0, "", 0, "kind ''"),
        (0, "k" * 65, 0, "kind 'kkk"),
    ],
)
def test_a_name_that_could_not_be_parsed_is_not_built(shard, kind, layer, words) -> None:
    with pytest.raises(ValueError, match=words):
        format_name(shard, kind, layer)


@pytest.mark.slow
@given(st.sets(st.tuples(KIND, st.integers(0, 60))), BEGINS, BEGINS)
def test_a_rename_moves_every_layer_to_its_new_shard(
    tensors, old: list[int], new: list[int]
) -> None:
    names = list(rename_table([format_name(0, *tensor) for tensor in tensors], old).values())
    table = rename_table(names, new)
    assert table == slow.rename_table(names, new)
    assert list(table) == names


@pytest.mark.slow
@given(st.sets(st.tuples(KIND, st.integers(0, 60))), BEGINS, BEGINS)
def test_there_and_back_is_the_same_name(tensors: set, old: list, new: list) -> None:
    names = list(rename_table([format_name(0, *tensor) for tensor in tensors], old).values())
    moved = list(rename_table(names, new).values())
    assert list(rename_table(moved, old).values()) == names


@pytest.mark.parametrize("begins", [[], [1], [0, 0], [0, 4, 3], [-1, 2]])
def test_a_split_must_start_at_layer_zero_and_rise(begins: list[int]) -> None:
    with pytest.raises(ValueError, match="layer begins"):
        rename_table(["ls0_conv.0"], begins)


@pytest.mark.parametrize("names", [["ls0_conv.3", "ls1_conv.3"], ["ls0_conv.3", "ls0_conv.3"]])
def test_two_tensors_never_get_one_name(names: list[str]) -> None:
    with pytest.raises(ValueError, match="twice"):
        rename_table(names, [0])
